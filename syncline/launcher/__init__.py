"""Stage 1: start ranks, watch them, end them; or adopt the rank that another launcher gave us."""
