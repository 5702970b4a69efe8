"""Stage 7: what happened: comparison, certificates, statistics."""
