"""Helpers for all parts: numbers as text, optional packages, atomic writes of files, seeds, the machine, the
terminal."""
