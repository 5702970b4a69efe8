"""Stage 5: one step, the loop around it, checkpoints, evaluation."""
