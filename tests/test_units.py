"""Numbers for people: the unit fits the size."""

from __future__ import annotations

import pytest

from syncline.errors import UsageError
from syncline.units import format_bytes, format_rate, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 µs"),
        (0.000_25, "250 µs"),
        (0.0032, "3.2 ms"),
        (0.25, "250 ms"),
        (1.5, "1.50 s"),
        (75, "1 min 15 s"),
        (119.6, "2 min 0 s"),
        (7260, "2 h 1 min"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (36_924_456, "36.9 MB"), (5e9, "5.0 GB"), (5e12, "5000.0 GB")],
)
def test_bytes(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text


def test_rate() -> None:
    assert format_rate(125e6) == "125.0 MB/s"


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("4096", 4096), ("64kB", 64_000), (" 1.5 MB ", 1_500_000), ("2gb", 2 * 10**9), ("7 B", 7)]
)
def test_sizes_that_people_type(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "big", "-1", "1 TB", "0", "1e3", "kB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        parse_bytes(text)
