"""Draws what accounting/explanation.py found: the table of parts, the verdict, one step bucket by
bucket; and what the run used besides time: bytes on the wire, rates of the buckets, memory, operators."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Literal

from rich.console import Console

from syncline.accounting import contention
from syncline.accounting.advice import named_steps
from syncline.accounting.bandwidth import Bandwidth, BucketRate, Wire
from syncline.accounting.breakdown import PARTS
from syncline.accounting.explanation import Explanation, MethodExplanation, RankOfStep, StepExplanation
from syncline.accounting.usage import Profiled, RankMemory
from syncline.report.terminal import prediction_text, print_table
from syncline.units import format_bytes, format_rate, format_seconds

WIDTH = 100
Row = tuple[str, float, Mapping[str, float], float]
"""Name, step, parts, hidden."""
CAPTION = (
    "Milliseconds, means over {steps} steps after {warmup} warm-up steps; the parts add up to the step.\n"
    "wait: for a slower rank; wire: transfers that backward did not hide; hidden: those that it did."
)


def show_explanation(explanation: Explanation) -> None:
    title = f"{explanation.run}: {explanation.kind}, {explanation.model}, {_counted(explanation.workers, 'worker')}"
    if explanation.hosts > 1:
        title += f" on {explanation.hosts} hosts"
    if len(explanation.methods) == 1:
        _show_ranks(explanation.methods[0], title, explanation.warmup)
    else:
        _show_methods(explanation.methods, title, explanation.warmup)
    _paragraph(explanation.verdict)
    for method in explanation.methods:
        if len(explanation.methods) == 1 and not explanation.injected:
            hidden_s, compute = method.breakdown.hidden_s, explanation.compute
            _paragraph(contention.describe(method.contention, hidden_s=hidden_s, compute=compute))
        if method.predicted is not None:
            _paragraph(f"{method.method}: {prediction_text(method.predicted)}")
        _show_outliers(method, several=len(explanation.methods) > 1)
        _show_stragglers(method, several=len(explanation.methods) > 1)
        show_resources(method, several=len(explanation.methods) > 1)
    show_profile(explanation.profile)
    for text in explanation.notes:
        _paragraph(f"Note: {text}")
    for text in explanation.problems:
        _paragraph(f"The log: {text}.")


def show_step(explanation: StepExplanation) -> None:
    _table([(f"rank {rank.rank}", rank.step_s, rank.parts_s, rank.hidden_s) for rank in explanation.ranks],
           f"{explanation.run}: {explanation.method}, step {explanation.step}", "Milliseconds.")  # fmt: skip
    for rank in explanation.ranks:
        _show_buckets(rank)
    if explanation.missing:
        print(f"rank {', '.join(map(str, explanation.missing))} did not finish this step")
    for text in explanation.problems:
        _paragraph(f"The log: {text}.")


def _show_buckets(rank: RankOfStep) -> None:
    head = f"rank {rank.rank}: started {_ms(rank.start_s)}, last gradient {_ms(rank.last_ready_s)}"
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
        for bucket in rank.buckets
    ]
    if rows:
        print_table(columns, rows, title=f"{head}; milliseconds from the first rank's start")
    else:
        print(f"{head}; nothing was sent")


def _show_ranks(method: MethodExplanation, title: str, warmup: int) -> None:
    own = method.breakdown
    rows = [(f"rank {rank.rank}", rank.step_s, rank.parts_s, rank.hidden_s) for rank in own.ranks]
    if len(rows) > 1:
        rows.append(("mean", own.step_s, own.parts_s, own.hidden_s))
    caption = CAPTION.format(steps=own.steps, warmup=warmup)
    _table(rows, f"{title}, {method.method}", caption, shares="last")


def _show_methods(methods: Sequence[MethodExplanation], title: str, warmup: int) -> None:
    means = {method.method: method.breakdown for method in methods}
    rows = [(name, mean.step_s, mean.parts_s, mean.hidden_s) for name, mean in means.items()]
    caption = CAPTION.format(steps=max(mean.steps for mean in means.values()), warmup=warmup)
    _table(rows, title, f"{caption}\nMeans over ranks; --method shows them one by one.", shares="every")


def _table(
    rows: Sequence[Row], title: str, caption: str, *, shares: Literal["none", "last", "every"] = "none"
) -> None:
    """One row for each rank or method; parts that nobody has are left out; below the last or every row its shares."""
    shown = [part for part in PARTS if any(parts[part] >= 5e-8 for _, _, parts, _ in rows)]
    cells = []
    for number, (name, step_s, parts, hidden_s) in enumerate(rows):
        cells.append([name, _ms(step_s), *(_ms(parts[part]) for part in shown), _ms(hidden_s)])
        if step_s and (shares == "every" or (shares == "last" and number == len(rows) - 1)):
            digits = 1 if shares == "last" else 0  # between other rows, no wider than the times are
            of_step = [f"{parts[part] / step_s:.{digits}%}" for part in shown]
            cells.append(["share" if shares == "last" else "", "100%", *of_step, f"({hidden_s / step_s:.{digits}%})"])
    print_table(["", "step", *shown, "hidden"], cells, title=title, caption=caption)


def _show_outliers(method: MethodExplanation, *, several: bool) -> None:
    for outliers in method.outliers:
        prefix = f"{method.method}: " if several else ""
        cause = "data, where the loader started its workers" if outliers.loader_starts else outliers.part
        times = f"{outliers.step_s / outliers.usual_s:.1f} times the usual {format_seconds(outliers.usual_s)}"
        took = f"took {format_seconds(outliers.step_s)}, {times}"
        _paragraph(f"{prefix}Outliers: {named_steps(outliers)} {took}: {cause}. The table leaves them out.")


def _show_stragglers(method: MethodExplanation, *, several: bool) -> None:
    for straggler in method.stragglers:
        prefix = f"{method.method}: " if several else ""
        late = f"{format_seconds(straggler.late_s)} late in {straggler.late_steps} of {straggler.steps} steps"
        waited = f"the others wait {format_seconds(straggler.waited_s)} a step, {straggler.waited_share:.0%} of it"
        _paragraph(f"{prefix}Straggler: rank {straggler.rank}, {straggler.phase}, {late}; {waited}.")


def _paragraph(text: str) -> None:
    width = min(WIDTH, Console().width) if sys.stdout.isatty() else WIDTH
    print("\n" + textwrap.fill(text, width))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def _counted(count: int, what: str) -> str:
    return f"1 {what}" if count == 1 else f"{count} {what}s"


MOST_BUCKETS = 8
MOST_OPERATORS = 10


def show_resources(method: MethodExplanation, *, several: bool) -> None:
    """In a comparison only warnings: tables of every method would bury them."""
    bandwidth = method.bandwidth
    if bandwidth is not None and bandwidth.note:
        print(f"\nWARNING: {method.method}: {bandwidth.note}.")
    if several:
        return
    if bandwidth is not None and bandwidth.buckets:
        _show_bytes(bandwidth)
        _show_rates(bandwidth)
    if method.memory:
        _show_memory(method.memory)


def _show_bytes(bandwidth: Bandwidth) -> None:
    rows = [
        [
            f"rank {rank.rank}",
            *_pair(rank.theory),
            *_pair(rank.counted),
            {True: "yes", False: "NO", None: "-"}[rank.agrees],
            *_pair(rank.interface),
        ]
        for rank in bandwidth.ranks
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
    shown = 8 if any(rank.interface for rank in bandwidth.ranks) else 6
    print_table(columns[:shown], [row[:shown] for row in rows])


def _pair(wire: Wire | None) -> list[str]:
    return ["-", "-"] if wire is None else [format_bytes(wire.sent), format_bytes(wire.received)]


def _show_rates(bandwidth: Bandwidth) -> None:
    """The largest; many small ones would fill the screen."""
    largest = sorted(bandwidth.buckets, key=lambda bucket: -bucket.num_bytes)[:MOST_BUCKETS]
    left_out = len(bandwidth.buckets) - len(largest)
    columns = ["operation", "size", "time", "algorithm", "bus", "of the link"]
    if bandwidth.link_bytes_per_s:
        caption = f"Link: {format_rate(bandwidth.link_bytes_per_s)} one way, from {bandwidth.link_source}."
    else:
        caption = f"Utilisation: {bandwidth.link_source}."
    if left_out:
        caption += f" The {len(largest)} largest; {left_out} more in --json."
    print_table(columns, [_rate(bucket) for bucket in largest], caption=caption)


def _rate(bucket: BucketRate) -> list[str]:
    return [
        f"{bucket.name} {bucket.label}",
        format_bytes(bucket.num_bytes),
        format_seconds(bucket.seconds),
        format_rate(bucket.algorithm_bytes_per_s),
        "-" if bucket.bus_bytes_per_s is None else format_rate(bucket.bus_bytes_per_s),
        "-" if bucket.utilisation is None else f"{bucket.utilisation:.0%}",
    ]


def _show_memory(ranks: list[RankMemory]) -> None:
    columns = ["memory", "peak resident", "parameters", "gradients", "buffers"]
    rows = [
        [
            f"rank {rank.rank}",
            format_bytes(rank.peak_resident_bytes),
            format_bytes(rank.parameter_bytes),
            "in buffers" if rank.gradients_in_buffers else format_bytes(rank.gradient_bytes),
            format_bytes(rank.buffer_bytes),
        ]
        for rank in ranks
    ]
    print_table(columns, rows)


def show_profile(profile: Profiled | None) -> None:
    if profile is None:
        return
    for problem in profile.problems:
        print(f"The profile: {problem}.")
    if not profile.operators:
        return
    rows = [
        [operator.name, f"{operator.calls:g}", format_seconds(operator.self_s), f"{operator.share:.1%}"]
        for operator in profile.operators[:MOST_OPERATORS]
    ]
    where = ", ".join(f"rank {rank} step {step}" for rank, step in profile.recorded)
    caption = f"Per step, excluding the operators that it calls. Recorded: {where}; recording slows a step down."
    print_table(["operator", "calls", "time", "share"], rows, caption=caption)
