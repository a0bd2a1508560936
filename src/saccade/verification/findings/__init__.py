"""The results of a verification: findings, their places in the target's source, and words for both."""
