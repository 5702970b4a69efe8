"""Numbers for people: print bytes, seconds and rates with a unit that fits, and read what people type."""

from __future__ import annotations

import re

from syncline.errors import UsageError

_BITS_PER_S = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


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


def format_minutes(seconds: float) -> str:
    """Of an estimate: about 3 min."""
    return f"about {seconds / 60:.0f} min" if seconds >= 90 else f"about {max(seconds, 1):.0f} s"


def format_bytes(num_bytes: float) -> str:
    """36924456 -> '36.9 MB' (decimal units, as links and disks are rated)."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(num_bytes) < 1000 or unit == "GB":
            break
        num_bytes /= 1000
    return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"


def format_rate(bytes_per_s: float) -> str:
    """125e6 -> '125.0 MB/s'."""
    return f"{format_bytes(bytes_per_s)}/s"


def format_count(value: float) -> str:
    """13523.4 -> '13523', 3.14 -> '3.1', 0.042 -> '0.042': a rate of things that may be slow."""
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def parse_bytes(text: str) -> int:
    """'64kB', '1MB', '4096' -> bytes, in decimal units. Anything else is a UsageError."""
    matched = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(B|kB|MB|GB)?\s*", text, re.IGNORECASE)
    factors = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9}
    size = round(float(matched[1]) * factors[(matched[2] or "").lower()]) if matched else 0
    if size < 1:
        raise UsageError(f"{text.strip()!r} is not a size.", action="Write it as 64kB, 1MB or a number of bytes.")
    return size


def parse_rate(text: str) -> float:
    """'1gbit' -> 1e9 bits per second; '2.5gbit', '100 Mbit/s' and '64kbit' too. Decimal units, as links are rated."""
    matched = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]?bit)(?:/s)?\s*", text.lower())
    if matched is None or float(matched[1]) <= 0:
        raise UsageError(f"{text!r} is not a rate.", action="Write it as 1gbit, 2.5gbit, 100mbit or 64kbit.")
    return float(matched[1]) * _BITS_PER_S[matched[2]]


def format_bit_rate(bits_per_s: float) -> str:
    """1e9 -> '1 Gbit/s'; 9.42e8 -> '942 Mbit/s'."""
    for unit in ("bit/s", "kbit/s", "Mbit/s", "Gbit/s"):
        if abs(bits_per_s) < 999.5 or unit == "Gbit/s":
            break
        bits_per_s /= 1000
    return f"{bits_per_s:.3g} {unit}"


def printable(text: str) -> str:
    """Characters that would act on a terminal or a page (escape codes, changes of direction, line ends) as \\x1b."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape", "surrogatepass").decode()
        for letter in text
    )
