"""Draws what accounting/explanation.py found: the table of parts, the verdict, one step bucket by
bucket; and what the run used beside time: bytes on the wire, rates of the buckets, memory, operators."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from syncline.accounting import contention
from syncline.accounting.bandwidth import Bandwidth, BucketRate, Wire
from syncline.accounting.breakdown import PARTS
from syncline.accounting.explanation import Explanation, MethodExplanation, RankOfStep, StepExplanation
from syncline.accounting.usage import Profiled, RankMemory
from syncline.report.terminal import print_table
from syncline.units import format_bytes, format_rate, format_seconds

WIDTH = 100
Row = tuple[str, float, Mapping[str, float], float]
"""Name, step, parts, hidden."""
CAPTION = (
    "Milliseconds, means over {steps} steps (warm-up steps cut: {warmup}); the parts add up to the step.\n"
    "wait: for a slower rank; wire: gradients on their way that backward did not hide. Hidden: the part that it did."
)


def show_explanation(found: Explanation) -> None:
    title = f"{found.run}: {found.kind}, {found.model}, {_counted(found.workers, 'worker')}"
    if found.hosts > 1:
        title += f" on {found.hosts} hosts"
    if len(found.methods) == 1:
        _show_ranks(found.methods[0], title, found.warmup)
    else:
        _show_methods(found.methods, title, found.warmup)
    _paragraph(found.verdict)
    for method in found.methods:
        if len(found.methods) == 1 and not found.injected:
            _paragraph(
                contention.describe(method.contention, hidden_s=method.breakdown.hidden_s, compute=found.compute)
            )
        _show_stragglers(method, several=len(found.methods) > 1)
        show_resources(method, several=len(found.methods) > 1)
    show_profile(found.profile)
    for text in found.notes:
        _paragraph(f"Note: {text}")
    for text in found.problems:
        _paragraph(f"The log: {text}.")


def show_step(found: StepExplanation) -> None:
    _table([(f"rank {one.rank}", one.step_s, one.parts_s, one.hidden_s) for one in found.ranks],
           f"{found.run}: {found.method}, step {found.step}", "Milliseconds.")  # fmt: skip
    for one in found.ranks:
        _show_buckets(one)
    if found.missing:
        print(f"not finished by rank {', '.join(map(str, found.missing))}")
    for text in found.problems:
        _paragraph(f"The log: {text}.")


def _show_buckets(one: RankOfStep) -> None:
    head = f"rank {one.rank}: started {_ms(one.start_s)}, last gradient {_ms(one.last_ready_s)}"
    columns = ["bucket", "size", "ready", "on all ranks", "last rank", "start", "end", "wait", "wire"]
    rows = [
        [
            bucket.label,
            format_bytes(bucket.num_bytes),
            _ms(bucket.ready_s),
            _ms(bucket.ready_everywhere_s),
            str(bucket.last_rank),
            _ms(bucket.start_s),
            _ms(bucket.end_s),
            _ms(bucket.wait_s),
            _ms(bucket.wire_s),
        ]
        for bucket in one.buckets
    ]
    if rows:
        print_table(columns, rows, title=f"{head}; milliseconds from the first rank's start")
    else:
        print(f"{head}; nothing was sent")


def _show_ranks(method: MethodExplanation, title: str, warmup: int) -> None:
    own = method.breakdown
    rows = [(f"rank {one.rank}", one.step_s, one.parts_s, one.hidden_s) for one in own.ranks]
    if len(rows) > 1:
        rows.append(("mean", own.step_s, own.parts_s, own.hidden_s))
    caption = CAPTION.format(steps=own.steps, warmup=warmup)
    _table(rows, f"{title}, {method.method}", caption, own.step_s)


def _show_methods(methods: Sequence[MethodExplanation], title: str, warmup: int) -> None:
    rows = [(one.method, one.breakdown.step_s, one.breakdown.parts_s, one.breakdown.hidden_s) for one in methods]
    caption = CAPTION.format(steps=max(one.breakdown.steps for one in methods), warmup=warmup)
    _table(rows, title, f"{caption}\nMeans over ranks; --method shows them one by one.")


def _table(rows: Sequence[Row], title: str, caption: str, whole_s: float | None = None) -> None:
    """One row for each rank or method; parts that nobody has are left out; a last row with shares where asked."""
    shown = [part for part in PARTS if any(parts[part] >= 5e-8 for _, _, parts, _ in rows)]
    cells = [
        [name, _ms(step_s), *(_ms(parts[part]) for part in shown), _ms(hidden_s)]
        for name, step_s, parts, hidden_s in rows
    ]
    if whole_s:
        _, _, parts, hidden_s = rows[-1]
        cells.append(
            ["share", "100%", *(f"{parts[part] / whole_s:.1%}" for part in shown), f"({hidden_s / whole_s:.1%})"]
        )
    print_table(["", "step", *shown, "hidden"], cells, title=title, caption=caption)


def _show_stragglers(method: MethodExplanation, *, several: bool) -> None:
    for one in method.stragglers:
        prefix = f"{method.method}: " if several else ""
        late = f"{format_seconds(one.late_s)} late in {one.late_steps} of {one.steps} steps"
        waited = f"the others wait {format_seconds(one.waited_s)} a step, {one.waited_share:.0%} of it"
        _paragraph(f"{prefix}Straggler: rank {one.rank}, {one.phase}, {late}; {waited}.")


def _paragraph(text: str) -> None:
    print("\n" + textwrap.fill(text, WIDTH))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def _counted(count: int, what: str) -> str:
    return f"1 {what}" if count == 1 else f"{count} {what}s"


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
