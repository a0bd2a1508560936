"""Images, sounds and time series: from files and arrays to what a model reads, and the layers around its blocks.

Begin with `images.py`. Imports `decoding` and what all models have in common.
"""
