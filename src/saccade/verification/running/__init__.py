"""Running one verification: its job, the child process and how it ended, and which findings explain others."""
