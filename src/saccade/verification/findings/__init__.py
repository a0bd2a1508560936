"""What a verification gives: findings, where they are in the target's source, and plain words for both."""
