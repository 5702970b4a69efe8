"""Stage 10: tables: draws what earlier stages return, computes nothing."""
