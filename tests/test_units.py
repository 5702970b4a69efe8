"""Numbers for people: the unit fits the size."""

from __future__ import annotations

import pytest

from syncline.errors import UsageError
from syncline.machine import signal_name
from syncline.units import format_bit_rate, format_bytes, format_rate, format_seconds, parse_bytes, parse_rate


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


@pytest.mark.parametrize(
    ("text", "bits_per_s"),
    [("1gbit", 1e9), ("2.5Gbit", 2.5e9), ("100 Mbit/s", 1e8), (" 64kbit ", 64e3), ("9600bit", 9600)],
)
def test_rates_are_read_as_people_write_them(text: str, bits_per_s: float) -> None:
    assert parse_rate(text) == bits_per_s


@pytest.mark.parametrize("text", ["", "1", "gbit", "1GB", "-1gbit", "0gbit", "1tbit", "1gbit 2"])
def test_what_is_not_a_rate_is_refused_by_name(text: str) -> None:
    with pytest.raises(UsageError, match=r"is not a rate\. Write it as 1gbit") as error:
        parse_rate(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize(
    ("bits_per_s", "text"),
    [(9600, "9.6 kbit/s"), (1e8, "100 Mbit/s"), (9.42e8, "942 Mbit/s"), (999.9e6, "1 Gbit/s"), (2.5e10, "25 Gbit/s")],
)
def test_rates_are_printed_with_a_unit_that_fits(bits_per_s: float, text: str) -> None:
    assert format_bit_rate(bits_per_s) == text


def test_every_signal_has_a_name() -> None:
    assert signal_name(9) == "SIGKILL"
    assert signal_name(40) == "signal 40", "a real-time signal"
