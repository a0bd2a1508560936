"""Whether a mask has the meaning that its argument promises, and otherwise which other mask explains the result."""
