"""Numbers for people: print bytes, seconds and rates with a unit that fits."""

from __future__ import annotations


def format_seconds(seconds: float) -> str:
    """0.0032 -> '3.2 ms'; 1.5 -> '1.50 s'; 75 -> '1 min 15 s'."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 0.1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def format_spread(seconds: float, spread_s: float) -> str:
    """A median with half its spread in the same unit: '12.6 ±0.5 ms'."""
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ±{spread_s * 500:.1f} ms"
    return f"{seconds:.2f} ±{spread_s / 2:.2f} s"


def format_bytes(num_bytes: float) -> str:
    """36924456 -> '36.9 MB' (decimal units, as links and disks are rated)."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(num_bytes) < 1000 or unit == "GB":
            break
        num_bytes /= 1000
    return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
