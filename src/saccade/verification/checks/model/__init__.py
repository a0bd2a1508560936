"""The parts of the check `model`: causality, padding, batches, caches, and the two halves of an encoder-decoder."""
