"""Tables of a study as data: rows, columns, texts and raw numbers. Drawing is report's."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from syncline.accounting.sanity import Warning, check_rows, efficiency_above_one, merged
from syncline.methods import BASELINE
from syncline.study import file
from syncline.study.rows import Quantity, Row, matching
from syncline.study.values import VALUES, Value

KEY_LABELS = {
    "method": "method",
    "nodes": "nodes",
    "workers": "workers",
    "workers_per_node": "processes per node",
    "batch_per_node": "batch per node",
    "global_batch": "global batch",
    "batch_per_worker": "batch per worker",
    "options.bucket_cap_mb": "bucket MB",
    "options.groups": "groups",
    "accumulate": "steps without sync",
}
COLUMN_LABELS = {"batch_per_worker": "per worker"}
"""After a value, at the head of a column."""


@dataclass(frozen=True)
class TableData:
    title: str
    columns: list[str]
    rows: list[list[str]]
    numbers: list[list[float | None]]
    """The same cells as plain numbers, for CSV; None where a cell is text."""
    definitions: list[tuple[str, str]]
    """Of each value shown: its label and its definition."""
    warnings: list[Warning]
    marks: list[str]
    note: str = ""
    baseline: str = ""
    """The text of the first cell of the baseline row."""

    @property
    def num_keys(self) -> int:
        """How many of the first columns say what a line is about, and hold no numbers."""
        is_key = [all(number is None for number in column) for column in zip(*self.numbers, strict=True)]
        return len(list(itertools.takewhile(bool, is_key)))


def key_label(key: str) -> str:
    return KEY_LABELS.get(key, key.rpartition(".")[2].replace("_", " "))


def build_table(spec: file.Table, rows: Sequence[Row], values: Mapping[str, Value] = VALUES) -> TableData:
    """One line for each combination of row keys, one column for each value and combination of column keys.

    `values` are all that a study may show, by name.
    """
    here = matching(rows, spec.stage, spec.where)
    if spec.kind == "losses":
        return _loss_table(spec, here)
    if not any(row.parts.get("copy") for row in here):  # nothing is copied on a CPU: no column of zeros
        spec = spec.model_copy(update={"values": [name for name in spec.values if name != "copy"]})
    lines = _combinations(here, spec.rows)
    across = _combinations(here, spec.columns) if spec.columns else [()]
    columns = [key_label(key) for key in spec.rows]
    shown = [(values[name], chosen) for name in spec.values for chosen in across]
    columns += [_column(value, chosen, spec) for value, chosen in shown]
    texts, numbers = [], []
    for line in lines:
        cells = [_cell(value, line, chosen, spec, here, rows) for value, chosen in shown]
        texts.append([*map(str, line), *(value.text(cell) for (value, _), cell in zip(shown, cells, strict=True))])
        numbers.append([*(None for _ in line), *(cell.value if cell else None for cell in cells)])
    return TableData(
        title=spec.title,
        columns=columns,
        rows=texts,
        numbers=numbers,
        definitions=[(values[name].label, values[name].definition) for name in spec.values],
        warnings=[*_too_efficient(spec, here), *_beside_marks(check_rows(here), here)],
        marks=_marks(here),
        note=spec.note,
        baseline=BASELINE if any(row.method == BASELINE for row in here) else "",
    )


def _loss_table(spec: file.Table, rows: Sequence[Row]) -> TableData:
    """One line for each run and rank, one column for each step at which the loss was noted."""
    noted = [(row, line) for row in rows for line in row.figures.get("losses") or []]
    steps = sorted({line["step"] for _, line in noted})
    losses: dict[tuple[Any, ...], dict[int, float]] = {}
    for row, line in noted:
        for rank, loss in enumerate(line["by_rank"]):
            if loss is not None:
                losses.setdefault((*_combinations([row], spec.rows)[0], rank), {})[line["step"]] = loss
    return TableData(
        title=spec.title,
        columns=[*(key_label(key) for key in spec.rows), "rank", *(f"step {step}" for step in steps)],
        rows=[
            [*map(str, who), *(f"{own[step]:.4f}" if step in own else "-" for step in steps)]
            for who, own in losses.items()
        ],
        numbers=[[*(None for _ in who), *(own.get(step) for step in steps)] for who, own in losses.items()],
        definitions=[("loss", "Mean loss over the rank's own shard of that step's global batch.")],
        warnings=[],
        marks=[],
        note=spec.note,
    )


def _marks(rows: Sequence[Row]) -> list[str]:
    """Each once; one that another begins with is said by that."""
    texts = dict.fromkeys(mark.text for row in rows for mark in row.marks)
    return [mark for mark in texts if not any(other != mark and other.startswith(mark) for other in texts)]


def _beside_marks(warnings: Sequence[Warning], rows: Sequence[Row]) -> list[Warning]:
    """Without the marks that all rows share: those are printed once below the table."""
    alike = all(any(mark.startswith(own.text) for own in row.marks) for mark in _marks(rows) for row in rows)
    return [warning for warning in warnings if not (alike and warning.rule == "unreal time")]


def _too_efficient(spec: file.Table, rows: Sequence[Row]) -> list[Warning]:
    if not {"speedup", "efficiency"} & set(spec.values):
        return []
    judged = []
    several = len({row.point.get("model") for row in rows}) > 1
    for row in rows:
        efficiency = VALUES["efficiency"].read(row, rows)
        if efficiency is not None:
            who = f"{row.point.get('model')} with {row.method}" if several else row.method
            name = f"{who} on {row.workers} workers"
            judged.append((name, efficiency_above_one(efficiency.value, name)))
    doubtful = [(name, warning) for name, warning in judged if warning is not None]
    return [merged(doubtful)] if doubtful else []


def _combinations(rows: Iterable[Row], keys: Sequence[str]) -> list[tuple[Any, ...]]:
    """In the order in which they were measured."""
    return list(dict.fromkeys(tuple(_hashable(row.point.get(key, "-")) for key in keys) for row in rows))


def _hashable(value: Any) -> Any:
    return ", ".join(map(str, value)) if isinstance(value, list) else value


def _column(value: Value, chosen: tuple[Any, ...], spec: file.Table) -> str:
    if not spec.columns:
        return value.label
    where = ", ".join(
        counted(number, COLUMN_LABELS.get(key) or key_label(key))
        for key, number in zip(spec.columns, chosen, strict=True)
    )
    return where if len(spec.values) == 1 else f"{value.label}, {where}"


def counted(value: Any, label: str) -> str:
    return f"{value} {label.removesuffix('s') if value == 1 else label}"


def _cell(
    value: Value,
    line: tuple[Any, ...],
    chosen: tuple[Any, ...],
    spec: file.Table,
    here: Sequence[Row],
    rows: Sequence[Row],
) -> Quantity | None:
    """Of the rows that the table shows; held against all rows, since a baseline may not be among those."""
    wanted = dict(zip((*spec.rows, *spec.columns), (*line, *chosen), strict=True))
    for row in here:
        if all(_hashable(row.point.get(key, "-")) == place for key, place in wanted.items()):
            return value.read(row, rows)
    return None
