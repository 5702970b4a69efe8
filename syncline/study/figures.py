"""Figures of a study as data: series of numbers or spans, and a sentence that says what a picture would show."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from syncline.events import Events, RankStep, Step
from syncline.measure.fits import NAMES, Law, fit_law
from syncline.study import file
from syncline.study.rows import Quantity, Row, key_label, matching
from syncline.study.tables import counted, yes_or_no
from syncline.study.values import VALUES, Value, format_quantity
from syncline.units import format_bytes


@dataclass(frozen=True)
class Series:
    name: str
    x: list[Any]
    y: list[float]
    half_spread: list[float] | None = None
    samples: list[list[float]] = field(default_factory=list)
    """For boxes: all numbers of each x."""
    fit_of: str = ""
    """A law through the series of this name: drawn as a thin line of its colour."""


@dataclass(frozen=True)
class FigureData:
    title: str
    kind: Literal["bars", "stacked", "lines", "boxes"]
    x_label: str
    y_label: str
    unit: str
    series: list[Series]
    note: str = ""
    ideal: bool = False
    """Draw the line of perfect scaling: y = x."""

    @property
    def text(self) -> str:
        """The figure in words, for those who cannot see it."""
        lines = [f"{self.title}: {self.y_label} against {self.x_label}."]
        for series in self.series:
            if series.fit_of:
                continue  # its law is in the table
            pairs = [
                f"{x} {format_quantity(Quantity(y), self.unit)}" for x, y in zip(series.x, series.y, strict=True)
            ]
            lines.append(f"{series.name}: {', '.join(pairs)}." if series.name else f"{', '.join(pairs)}.")
        return " ".join(lines)


def build_figure(spec: file.Figure, rows: Sequence[Row], known: Mapping[str, Value] = VALUES) -> FigureData | None:
    """The figure's numbers; None where nothing was measured that it could show."""
    here = matching(rows, spec.stage, spec.where)
    if spec.kind == "loss":
        return _losses(spec, here)
    if spec.kind == "times":
        return _times(spec, here)
    values = [known[name] for name in spec.values]
    if spec.kind == "stacked" or len(values) > 1:
        series = [_series(value.label, value, here, rows, spec) for value in values]
    else:
        names = dict.fromkeys(_name(row, spec.series) for row in here)
        series = [
            _series(name, values[0], [row for row in here if _name(row, spec.series) == name], rows, spec)
            for name in names
        ]
    # A part that nobody has, such as copying to a device, would only lengthen the legend.
    series = [entry for entry in series if entry.x and (spec.kind != "stacked" or any(entry.y))]
    if not series:
        return None
    if spec.fit is not None:
        series += [line for entry in series if (line := _fitted(entry, spec.fit)) is not None]
    kind: Any = spec.kind
    return FigureData(
        title=spec.title,
        kind=kind,
        x_label=key_label(spec.x),
        y_label=_y_label(values),
        unit=values[0].unit,
        series=series,
        note=" ".join(filter(None, [spec.note, f"Dashed: {NAMES[spec.fit]}'s law." if spec.fit else ""])),
        ideal=spec.values == ["speedup"] and spec.kind == "lines",
    )


def _y_label(values: Sequence[Value]) -> str:
    """Of several values the legend has the names: here is what they share, such as the loss of training and test."""
    last = {value.label.rpartition(" ")[2] for value in values}
    if len(values) > 1 and values[0].unit == "s":
        return "time"
    return last.pop() if len(last) == 1 and len(values) > 1 else ", ".join(value.label for value in values)


def _name(row: Row, keys: Sequence[str]) -> str:
    """Of a line or a group of bars; a number by itself says what it counts."""
    if keys and all(isinstance(row.point.get(key), int) for key in keys):
        return ", ".join(counted(row.point[key], key_label(key)) for key in keys)
    return row.label(keys)


def _series(name: str, value: Value, rows: Sequence[Row], all_rows: Sequence[Row], spec: file.Figure) -> Series:
    x: list[Any] = []
    y: list[float] = []
    half: list[float] = []
    samples: list[list[float]] = []
    for row in rows:
        quantity = value.read(row, all_rows)
        if quantity is not None:
            x.append(_axis(row.point.get(spec.x, "-")))
            y.append(quantity.value)
            half.append((quantity.spread or 0.0) / 2)
            samples.append(list(row.seconds))
    if all(not isinstance(place, str) for place in x):
        order = sorted(range(len(x)), key=lambda i: x[i])
        x, y, half = [x[i] for i in order], [y[i] for i in order], [half[i] for i in order]
        samples = [samples[i] for i in order]
    return Series(name, x, y, half if any(half) else None, samples if spec.kind == "boxes" else [])


def _fitted(measured: Series, law: Law) -> Series | None:
    """The law through a line of speed-ups; as many points as make a curve look like one."""
    fit = fit_law(law, dict(zip(measured.x, measured.y, strict=True)))
    if fit is None:
        return None
    last = max(measured.x)
    x = [1 + (last - 1) * part / 24 for part in range(25)]
    return Series(f"{measured.name}, {NAMES[law]}", x, [fit.speedup(at) for at in x], fit_of=measured.name)


def _axis(value: Any) -> Any:
    value = yes_or_no(value)
    return value if isinstance(value, int | float) else str(value)


def _losses(spec: file.Figure, rows: Sequence[Row]) -> FigureData | None:
    """The loss over the global batch against the step, one line a run."""
    keys = spec.series or ["method"]
    series = []
    for row in rows:
        lines = row.figures.get("losses") or []
        if lines:
            series.append(Series(row.label(keys), [line["step"] for line in lines], [line["loss"] for line in lines]))
    return FigureData(spec.title, "lines", "step", "loss", "", series, spec.note) if series else None


def _times(spec: file.Figure, rows: Sequence[Row]) -> FigureData | None:
    """The time of every timed step on the slowest rank, one line a run."""
    keys = spec.series or ["method"]
    series = [
        Series(row.label(keys), list(range(1, len(row.seconds) + 1)), list(row.seconds))
        for row in rows
        if row.seconds
    ]
    return FigureData(spec.title, "lines", "timed step", "time", "s", series, spec.note) if series else None


# One step of all ranks as lanes of spans, from the event log.

COMPUTE, COMMUNICATION = "compute", "communication"


@dataclass(frozen=True)
class Bar:
    lane: str
    name: str
    start_ms: float
    length_ms: float
    text: str


@dataclass(frozen=True)
class Timeline:
    title: str
    lanes: list[str]
    spans: list[Bar]
    note: str = ""

    @property
    def text(self) -> str:
        """In words: how long each rank's phases took."""
        compute = [bar for bar in self.spans if bar.lane.endswith(COMPUTE)]
        phases = [f"{bar.lane} {bar.name} {bar.length_ms:.1f} ms" for bar in compute]
        return f"{self.title}: {'; '.join(phases)}."


DISTINCT = ("model", "nodes", "workers", "workers_per_node", "threads", "batch_per_worker", "batch_per_node",
            "global_batch")  # fmt: skip
"""What tells rows of one method apart, in the order in which a reader asks for it; then the rest."""


def distinct_names(rows: Sequence[Row]) -> list[str]:
    """Of each row its method, and as much of its place in the grid as no other row of that method shares."""
    keys: list[str] = []
    rest = sorted({key for row in rows for key in row.point} - {*DISTINCT, "method", "compute"})
    for key in (*DISTINCT, *rest):
        names = [_distinct(row, keys) for row in rows]
        if len({*names}) == len(rows):
            break
        if len({_distinct(row, [*keys, key]) for row in rows}) > len({*names}):
            keys.append(key)
    return [_distinct(row, keys) for row in rows]


def _distinct(row: Row, keys: Sequence[str]) -> str:
    words = [f"{key_label(key)} {_axis(row.point[key])}" for key in keys if key in row.point]
    return ", ".join([row.method or "the run", *words])


def timeline_of(events: Events, method: str, *, warmup: int = 0, name: str = "") -> Timeline | None:
    """The step whose length is the median of the method's steps after the warm-up: a typical one.

    `name` says whose step it is, where the method alone does not.
    """
    steps = events.complete(method)[warmup:]
    if not len(steps):
        return None
    lengths = steps.longest.tolist()
    middle = statistics.median_low(lengths)
    step = steps[lengths.index(middle)]
    start = min(rank.start for rank in step.ranks.values())
    bars = [bar for rank in sorted(step.ranks) for bar in _bars(step.ranks[rank], start)]
    every = [f"rank {rank} {kind}" for rank in sorted(step.ranks) for kind in (COMPUTE, COMMUNICATION)]
    lanes = [lane for lane in every if any(bar.lane == lane for bar in bars)]  # a method may send nothing
    return Timeline(f"{name or method or 'the run'}: step {step.number}", lanes, bars, note=_note(step))


def _bars(rank: RankStep, start: int) -> Iterator[Bar]:
    for phase in rank.phases:
        yield _bar(f"rank {rank.rank} {COMPUTE}", phase.name, phase.start, phase.end, start)
    for stall in rank.stalls:
        yield _bar(f"rank {rank.rank} {COMPUTE}", "stall", stall.start, stall.end, start, f"waits for {stall.name}")
    before = [("transfer of the step before", transfer) for transfer in rank.carried]
    for name, transfer in [*before, *(("transfer", transfer) for transfer in rank.transfers)]:
        detail = f"{transfer.label or transfer.name}, {format_bytes(transfer.num_bytes)}"
        lane = f"rank {rank.rank} {COMMUNICATION}"
        yield _bar(lane, name, transfer.start, transfer.end, start, f"{transfer.name}: {detail}")


def _bar(lane: str, name: str, begin: int, end: int, start: int, detail: str = "") -> Bar:
    length = (end - begin) / 1e6
    return Bar(lane, name, (begin - start) / 1e6, length, f"{detail or name}: {length:.2f} ms")


def _note(step: Step) -> str:
    longest = max(rank.duration for rank in step.ranks.values()) / 1e6
    return f"A typical step: {longest:.0f} ms on its slowest rank."
