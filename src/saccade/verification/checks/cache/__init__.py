"""Whether decoding with a cache gives what one pass gives, and what a wrong cache has kept."""
