"""What kinds of machine differ in."""

from __future__ import annotations

STRONG_MEMORY_ORDER = ("x86_64", "AMD64")
"""Processors on which other cores see writes in the order in which they were made."""
