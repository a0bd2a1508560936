"""Saccade inside other frameworks: Hugging Face transformers (`transformers`, `trainer`), Lightning (`lightning`)."""
