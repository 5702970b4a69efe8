"""Stage 7a: what happened, from the logs of a run alone."""
