"""Draws what a run took beside time: bytes on the wire, rates of the buckets, memory, operators."""

from __future__ import annotations

from syncline.measure.bandwidth import Bandwidth, BucketRate
from syncline.measure.explain import MethodExplanation
from syncline.measure.memory import RankMemory
from syncline.measure.profiler import Profiled
from syncline.measure.theory import Wire
from syncline.report.tables import print_table
from syncline.units import format_bytes, format_rate, format_seconds

MOST_BUCKETS = 8
MOST_OPERATORS = 10


def show_resources(method: MethodExplanation, *, several: bool) -> None:
    """In a comparison only what does not fit: the tables would hide it."""
    found = method.bandwidth
    if found is not None and found.note:
        print(f"\nWARNING: {method.method}: {found.note}.")
    if several:
        return
    if found is not None and found.buckets:
        _show_bytes(found)
        _show_rates(found)
    if method.memory:
        _show_memory(method.memory)


def _show_bytes(found: Bandwidth) -> None:
    rows = [
        [
            f"rank {one.rank}",
            *_pair(one.theory),
            *_pair(one.counted),
            {True: "yes", False: "NO", None: "-"}[one.agrees],
            *_pair(one.interface),
        ]
        for one in found.ranks
    ]
    columns = [
        "bytes a step",
        "sent, theory",
        "received",
        "sent, counted",
        "received",
        "agree",
        "interface",
        "received",
    ]
    shown = 8 if any(one.interface for one in found.ranks) else 6
    print_table(columns[:shown], [row[:shown] for row in rows])


def _pair(wire: Wire | None) -> list[str]:
    return ["-", "-"] if wire is None else [format_bytes(wire.sent), format_bytes(wire.received)]


def _show_rates(found: Bandwidth) -> None:
    """The largest; many small ones would fill the screen."""
    largest = sorted(found.buckets, key=lambda one: -one.num_bytes)[:MOST_BUCKETS]
    left_out = len(found.buckets) - len(largest)
    columns = ["operation", "size", "time", "algorithm", "bus", "of the link"]
    if found.link_bytes_per_s:
        caption = f"Link: {format_rate(found.link_bytes_per_s)} one way, from {found.link_source}."
    else:
        caption = f"Utilisation: {found.link_source}."
    if left_out:
        caption += f" The {len(largest)} largest; {left_out} more in --json."
    print_table(columns, [_rate(one) for one in largest], caption=caption)


def _rate(one: BucketRate) -> list[str]:
    return [
        f"{one.name} {one.label}",
        format_bytes(one.num_bytes),
        format_seconds(one.seconds),
        format_rate(one.algorithm_bytes_per_s),
        "-" if one.bus_bytes_per_s is None else format_rate(one.bus_bytes_per_s),
        "-" if one.utilisation is None else f"{one.utilisation:.0%}",
    ]


def _show_memory(ranks: list[RankMemory]) -> None:
    columns = ["memory", "peak resident", "parameters", "gradients", "buffers"]
    rows = [
        [
            f"rank {one.rank}",
            format_bytes(one.peak_resident_bytes),
            format_bytes(one.parameter_bytes),
            "in buffers" if one.gradients_in_buffers else format_bytes(one.gradient_bytes),
            format_bytes(one.buffer_bytes),
        ]
        for one in ranks
    ]
    print_table(columns, rows)


def show_profile(found: Profiled | None) -> None:
    if found is None:
        return
    for problem in found.problems:
        print(f"The profile: {problem}.")
    if not found.operators:
        return
    rows = [
        [one.name, f"{one.calls:g}", format_seconds(one.self_s), f"{one.share:.1%}"]
        for one in found.operators[:MOST_OPERATORS]
    ]
    where = ", ".join(f"rank {rank} step {step}" for rank, step in found.recorded)
    caption = f"Per step, without the operators that it calls. Recorded: {where}; recording slows a step down."
    print_table(["operator", "calls", "time", "share"], rows, caption=caption)
