"""Stage 11: tables, figures, pages: draws what earlier stages return, computes nothing."""
