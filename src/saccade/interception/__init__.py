"""Meets the calls of attention that a model makes, and follows tensors through them.

Begin with `_hooks/`: calls that models make without Saccade, told to observers in the operator's terms.
"""
