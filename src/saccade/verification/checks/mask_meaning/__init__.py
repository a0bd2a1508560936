"""Whether the mask says what its argument promises, and which other mask explains what is seen."""
