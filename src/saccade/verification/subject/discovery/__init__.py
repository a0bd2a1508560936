"""Finding out how a target is to be called: by its signature, what its source says, and what it does."""
