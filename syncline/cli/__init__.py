"""Composition root: the command line, one verb per question."""
