"""Stage 4a: how averages travel: pure schedules and one executor."""
