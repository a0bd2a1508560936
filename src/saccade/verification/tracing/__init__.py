"""Follows tensors through one call of the target."""
