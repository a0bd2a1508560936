"""One verification as it runs: its job, the child process, how that ended, and what caused what."""
