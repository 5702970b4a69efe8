"""Grading: the numbers of somebody's run of a lab against a reference run's. Ratios, orders and losses, not times.

Times belong to a machine. What a lab is about holds on every machine: how much faster, in which order, down to
which loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from syncline.results import Tabular
from syncline.study.cell_rows import FROM_PLAN
from syncline.study.file import Grade, Stage, Study
from syncline.study.plan_keys import VIRTUAL
from syncline.study.rows import Quantity, Row, matching
from syncline.study.values import Value

Verdict = Literal["inside", "outside", "missing"]
VERDICTS: tuple[Verdict, ...] = ("inside", "outside", "missing")
SHARE = "%"
TOLERANCES = {"ratio": 0.25, "loss": 0.05, "share": 0.1, "order": 0.1}
"""Where the lab file gives none."""


Place = tuple[tuple[str, str], ...]
"""Where in the grid a row is: keys and values."""


@dataclass(frozen=True)
class Graded:
    """One number, or the order of two, of the graded run."""

    stage: str
    what: str
    where: str
    reference: str
    found: str
    tolerance: str
    verdict: Verdict


@dataclass(frozen=True)
class Grades(Tabular):
    """A run of a lab against a reference run: one row for each number or order."""

    folder: Path
    reference: Path
    graded: list[Graded]
    notes: list[str]
    """What a reader must know of either run: other load, stretched time."""

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [asdict(one) for one in self.graded]

    def count(self, verdict: Verdict) -> int:
        return sum(one.verdict == verdict for one in self.graded)

    @property
    def summary(self) -> str:
        words = [f"{self.count(verdict)} {verdict}" for verdict in VERDICTS]
        return f"{', '.join(words)}, of {len(self.graded)}"


def grade(study: Study, reference: Sequence[Row], found: Sequence[Row]) -> list[Graded]:
    """By the lab's [[grade]] entries; without any, by what its tables show."""
    graded = []
    for entry in study.grade or default_grades(study):
        stage = next(stage for stage in study.stage if stage.name == entry.stage)
        value = study.values()[entry.value]
        check = _orders if entry.kind == "order" else _numbers
        graded += list(check(entry, stage, value, reference, found))
    return graded


def default_grades(study: Study) -> list[Grade]:
    """Every ratio, share and loss of a table, and the order of the step times of every comparison."""
    shown = {(table.stage, name): None for table in study.table for name in table.values}
    known = study.values()
    numbers = [
        Grade(stage=stage, value=name)
        for stage, name in shown
        if known[name].unit in ("x", SHARE) or name.endswith("loss")
    ]
    timed = {stage for stage, name in shown if name in ("step", "mean_step", "throughput", "speedup")}
    compared = [stage.name for stage in study.stage if stage.name in timed and stage.run == "compare"]
    return [*numbers, *(Grade(stage=stage, kind="order", value="step") for stage in compared)]


def _numbers(
    entry: Grade, stage: Stage, value: Value, reference: Sequence[Row], found: Sequence[Row]
) -> Iterator[Graded]:
    kind = "share" if value.unit == SHARE else "loss" if entry.value.endswith("loss") else "ratio"
    tolerance = TOLERANCES[kind] if entry.tolerance is None else entry.tolerance
    told = f"±{tolerance:.0%}" if kind == "share" else f"±{tolerance:.0%} of it"
    theirs = _by_place(found, entry, stage)
    for place, row in _by_place(reference, entry, stage).items():
        wanted, other = value.read(row, reference), theirs.get(place)
        if wanted is None:
            continue
        got = value.read(other, found) if other is not None else None
        verdict: Verdict = "missing"
        if got is not None:
            off = abs(got.value - wanted.value) / (1 if kind == "share" else abs(wanted.value) or 1)
            verdict = "inside" if off <= tolerance else "outside"
        texts = [value.text(quantity and Quantity(quantity.value)) for quantity in (wanted, got)]
        yield Graded(stage.name, value.label, _words(place), texts[0], texts[1], told, verdict)


def _orders(
    entry: Grade, stage: Stage, value: Value, reference: Sequence[Row], found: Sequence[Row]
) -> Iterator[Graded]:
    """Of every two that differ by more than the tolerance in the reference, the same one must have less."""
    tolerance = TOLERANCES["order"] if entry.tolerance is None else entry.tolerance
    theirs = _ordered(found, entry, stage, value)
    for place, ours in _ordered(reference, entry, stage, value).items():
        apart = [(less, more) for less in ours for more in ours if ours[more] > ours[less] * (1 + tolerance)]
        if not apart:
            continue
        there = theirs.get(place, {})
        verdict: Verdict = "inside"
        if any(name not in there for pair in apart for name in pair):
            verdict = "missing"
        elif any(there[less] >= there[more] for less, more in apart):
            verdict = "outside"
        what, told = f"order of {value.label}", f"apart by {tolerance:.0%}"
        yield Graded(stage.name, what, _words(place), _chain(ours, tolerance), _chain(there, 0.0), told, verdict)


def _ordered(rows: Sequence[Row], entry: Grade, stage: Stage, value: Value) -> dict[Place, dict[str, float]]:
    """For each place without the key that is ordered: its values, from less to more."""
    groups: dict[Place, dict[str, float]] = {}
    for place, row in _by_place(rows, entry, stage).items():
        quantity, name = value.read(row, rows), dict(place).get(entry.by)
        if quantity is not None and name is not None:
            rest = tuple(pair for pair in place if pair[0] != entry.by)
            groups.setdefault(rest, {})[name] = quantity.value
    return {place: dict(sorted(group.items(), key=lambda pair: pair[1])) for place, group in groups.items()}


def _chain(values: Mapping[str, float], tolerance: float) -> str:
    """a < b = c: equal where two neighbours differ by less than the tolerance."""
    text, before = "", 0.0
    for name, value in values.items():
        sign = " < " if value > before * (1 + tolerance) else " = "
        text, before = f"{text}{sign if text else ''}{name}", value
    return text or "-"


def _by_place(rows: Sequence[Row], entry: Grade, stage: Stage) -> dict[Place, Row]:
    """Without what differs from machine to machine, such as the best values that an earlier stage found there."""
    placed: dict[Place, Row] = {}
    for row in matching(rows, entry.stage, entry.where):
        placed.setdefault(tuple((key, str(row.point[key])) for key in _keys(row, stage)), row)
    return placed


def _keys(row: Row, stage: Stage) -> list[str]:
    own = [*stage.grid, *stage.quick.grid, "method", "variant"]
    chosen = stage.best_of.keys if stage.best_of is not None else []
    # A probe or an experiment says in its rows what each is about.
    return [key for key in row.point if key in own or key not in (*FROM_PLAN, *VIRTUAL, *chosen)]


def _words(place: Iterable[tuple[str, str]]) -> str:
    return ", ".join(value if key in ("method", "variant") else f"{key} {value}" for key, value in place)
