"""How what is to be verified is found, built, read and called."""
