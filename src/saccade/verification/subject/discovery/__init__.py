"""Finding out how to call a target: from its signature, its source, and trial calls."""
