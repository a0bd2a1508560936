"""Helpers of the commands: texts, input and output files, examples, and parts of long commands."""
