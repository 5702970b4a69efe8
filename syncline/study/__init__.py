"""Studies: a grid of plans as a file, its cells, and what is concluded from their results."""
