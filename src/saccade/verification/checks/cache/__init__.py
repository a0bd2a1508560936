"""Whether decoding with a cache gives the outputs of one pass, and what a faulty cache keeps."""
