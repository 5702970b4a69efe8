"""Draws what measure/explain.py found: the table of parts, the verdict, one step bucket by bucket."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from syncline.measure import contention
from syncline.measure.breakdown import PARTS
from syncline.measure.explain import Explanation, MethodExplanation, RankOfStep, StepExplanation
from syncline.report.resources import show_profile, show_resources
from syncline.report.tables import print_table
from syncline.units import format_bytes, format_seconds

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
