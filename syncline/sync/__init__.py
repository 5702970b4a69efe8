"""Stage 4b: when gradients are averaged: one file per method."""
