"""Images, sound and time series: preprocessing to model inputs, and layers before and after the blocks.

Begin with `images.py`. Imports `decoding` and the files shared by all models.
"""
