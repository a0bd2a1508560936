"""Finding, building, reading and calling the target of a verification."""
