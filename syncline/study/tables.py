"""Tables of a study as data: rows, columns, texts and raw numbers. Drawing is report's."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from syncline.accounting.breakdown import PARTS
from syncline.accounting.ranking import listed
from syncline.accounting.sanity import Warning, check_rows, efficiency_above_one, merged
from syncline.methods import BASELINE
from syncline.study import file
from syncline.study.notes import Note, noted, notes_of
from syncline.study.rows import Row, baseline_of, key_label, matching
from syncline.study.values import VALUES, Value

AGAINST_ONE = {"speedup", "efficiency", "over_one_worker"}
"""Values that hold a row against another one."""
OF_CURVES = {"amdahl_share", "amdahl_limit", "amdahl_deviation", "gustafson_share", "gustafson_deviation"}
"""Values that all rows of a curve share."""
ADDING_UP = {*PARTS, "compute", "communication"}
UNTOLD = ("compute", "round")
"""Keys that say nothing to a reader of a table: a path, and what was pooled."""
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
    notes: list[list[list[Note]]] = field(default_factory=list)
    """Of each cell: what makes its number doubtful. Empty where nothing is."""

    @property
    def is_empty(self) -> bool:
        """Nothing was measured that it could show."""
        return all(number is None for line in self.numbers for number in line)

    @property
    def num_keys(self) -> int:
        """How many of the first columns say what a line is about, and hold no numbers."""
        is_key = [all(number is None for number in column) for column in zip(*self.numbers, strict=True)]
        return len(list(itertools.takewhile(bool, is_key)))


def build_table(spec: file.Table, rows: Sequence[Row], values: Mapping[str, Value] = VALUES) -> TableData:
    """One line for each combination of row keys, one column for each value and combination of column keys.

    `values` are all that a study may show, by name.
    """
    here = matching(rows, spec.stage, spec.where)
    if spec.kind == "losses":
        return _loss_table(spec, here)
    if spec.kind == "accuracies":
        return _accuracy_table(spec, here)
    spec = spec.model_copy(update={"values": _columns_of_values(spec, here)})
    if AGAINST_ONE & set(spec.values):
        here = with_baselines(here, rows)
    if set(spec.values) - OF_CURVES:
        spec = spec.model_copy(update={"rows": [*spec.rows, *_telling_apart(here, [*spec.rows, *spec.columns])]})
    lines = _combinations(here, spec.rows)
    across = _combinations(here, spec.columns) if spec.columns else [()]
    columns = [key_label(key) for key in spec.rows]
    shown = [(values[name], chosen) for name in spec.values for chosen in across]
    if spec.columns:  # a size at which nothing has this value needs no column
        places = [(value, chosen, _row_at(line, chosen, spec, here)) for value, chosen in shown for line in lines]
        full = {(value.label, chosen) for value, chosen, row in places if row and value.read(row, rows)}
        shown = [(value, chosen) for value, chosen in shown if (value.label, chosen) in full] or shown
    columns += [_column(value, chosen, spec) for value, chosen in shown]
    texts, numbers, notes = [], [], []
    for line in lines:
        found = [_row_at(line, chosen, spec, here) for _, chosen in shown]
        # Held against all rows, since a baseline may not be among those that the table shows.
        cells = [value.read(row, rows) if row else None for (value, _), row in zip(shown, found, strict=True)]
        texts.append([*map(str, line), *(value.text(cell) for (value, _), cell in zip(shown, cells, strict=True))])
        numbers.append([*(None for _ in line), *(cell.value if cell else None for cell in cells)])
        doubts = [
            _notes(row, value, rows) if cell else []
            for (value, _), row, cell in zip(shown, found, cells, strict=True)
        ]
        notes.append([*([] for _ in line), *doubts])
    return TableData(
        title=spec.title,
        columns=columns,
        rows=texts,
        numbers=numbers,
        definitions=[(values[name].label, values[name].definition) for name in spec.values],
        warnings=[*_too_efficient(spec, here), *_beside_marks(check_rows(here), here)],
        marks=_marks(here),
        note=" ".join(filter(None, [spec.note, _baselines(spec, here, rows)])),
        baseline=BASELINE if any(row.method == BASELINE for row in here) else "",
        notes=notes,
    )


def _columns_of_values(spec: file.Table, rows: Sequence[Row]) -> list[str]:
    """Beside parts, a step is the mean that they add up to. Nothing is copied on a CPU: no column of zeros."""
    values = [name for name in spec.values if name != "copy" or any(row.parts.get("copy") for row in rows)]
    if not ADDING_UP & set(values):
        return values
    whole = next((number for number, name in enumerate(values) if name in ("step", "mean_step")), 0)
    values = [name for name in values if name not in ("step", "mean_step", "parts_step")]
    return [*values[:whole], "parts_step", *values[whole:]]


def with_baselines(here: Sequence[Row], rows: Sequence[Row]) -> list[Row]:
    """And the rows that these are held against, where a table's filter left them out."""
    bases = [base for row in here if (base := baseline_of(row, rows)) is not None]
    left_out = {id(base): base for base in bases if not any(base is row for row in here)}
    return [*left_out.values(), *here]


def _telling_apart(rows: Sequence[Row], keys: Sequence[str]) -> list[str]:
    """A further key, where rows would share one line: none of them is dropped in silence."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(_combinations([row], keys)[0], []).append(row)
    shared = [group for group in groups.values() if len(group) > 1]
    others = dict.fromkeys(key for row in rows for key in row.point if key not in (*keys, *UNTOLD))
    for key in others:
        if any(len(_combinations(group, [key])) > 1 for group in shared):
            return [key, *_telling_apart(rows, [*keys, key])]
    return []


def _baselines(spec: file.Table, here: Sequence[Row], rows: Sequence[Row]) -> str:
    """Which row every speed-up is against, and the run that it was measured in."""
    if not AGAINST_ONE & set(spec.values):
        return ""
    held: dict[int, tuple[Row, list[str]]] = {}
    for row in here:
        base = baseline_of(row, rows)
        if base is not None and base is not row:
            held.setdefault(id(base), (base, []))[1].append(_name(row))
    told = [f"{_name(base)}{_run(base)}" for base, _ in held.values()]
    if len(told) < 2:
        return f"Held against {told[0]}." if told else ""
    by_base = zip(told, (names for _, names in held.values()), strict=True)
    whose = [f"{base} for {listed(list(dict.fromkeys(names)))}" for base, names in by_base]
    return f"Held against {'; '.join(whose)}."


def _name(row: Row) -> str:
    return f"{row.method} on {counted(row.workers, 'workers')}"


def _run(row: Row) -> str:
    step = row.step()
    took = f", {VALUES['step'].text(step)}" if step is not None else ""
    return f"{took}, in run {row.runs[0].name}" if row.runs else took


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
        definitions=[
            ("loss", "Mean loss over the rank's own shard of that step's global batch; steps count from 0.")
        ],
        warnings=[],
        marks=[],
        note=spec.note,
    )


def _accuracy_table(spec: file.Table, rows: Sequence[Row]) -> TableData:
    """One line for each run and rank: what it learnt from its own shards, and its own model on the test set."""
    texts, numbers = [], []
    for row in rows:
        last = (row.figures.get("epochs") or [{}])[-1]
        trained, tested = last.get("train_per_rank") or [], last.get("test_per_rank") or []
        for rank, own in enumerate(trained):
            test = tested[rank] if rank < len(tested) else {}
            figures = [own["loss"], own.get("accuracy"), test.get("loss"), test.get("accuracy")]
            who = _combinations([row], spec.rows)[0]
            shown = [_number(value, share=bool(place % 2)) for place, value in enumerate(figures)]
            texts.append([*map(str, who), str(rank), *shown])
            numbers.append([*(None for _ in who), None, *figures])
    return TableData(
        title=spec.title,
        columns=[*map(key_label, spec.rows), "rank", "training loss", "training accuracy", "test loss",
                 "test accuracy"],
        rows=texts,
        numbers=numbers,
        definitions=[
            ("training", "Over the rank's own shards of the last epoch, or of what ran of it."),
            ("test", "The test set with the rank's weights and its own batch-norm statistics."),
        ],
        warnings=[],
        marks=[],
        note=spec.note,
    )  # fmt: skip


def _number(value: float | None, *, share: bool) -> str:
    return "-" if value is None else f"{value:.2%}" if share else f"{value:.4f}"


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


def yes_or_no(value: Any) -> Any:
    """A switch as a reader calls it; anything else as it is."""
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else value


def _hashable(value: Any) -> Any:
    return ", ".join(map(str, value)) if isinstance(value, list) else yes_or_no(value)


def _column(value: Value, chosen: tuple[Any, ...], spec: file.Table) -> str:
    if not spec.columns:
        return value.label
    where = ", ".join(
        counted(number, COLUMN_LABELS.get(key) or key_label(key)) if isinstance(number, int | float) else str(number)
        for key, number in zip(spec.columns, chosen, strict=True)
    )
    return where if len(spec.values) == 1 else f"{value.label}, {where}"


def counted(value: Any, label: str) -> str:
    """A number by itself does not say what it counts; a name does."""
    if isinstance(value, str) and not value.replace(".", "").isdigit():
        return value
    return f"{value} {_one(label) if value == 1 else label}"


def _one(label: str) -> str:
    return label.replace("processes", "process") if "processes" in label else label.removesuffix("s")


def _row_at(line: tuple[Any, ...], chosen: tuple[Any, ...], spec: file.Table, here: Sequence[Row]) -> Row | None:
    wanted = dict(zip((*spec.rows, *spec.columns), (*line, *chosen), strict=True))
    for row in here:
        if all(_hashable(row.point.get(key, "-")) == place for key, place in wanted.items()):
            return row
    return None


def _notes(row: Row | None, value: Value, rows: Sequence[Row]) -> list[Note]:
    if row is None:
        return []
    scaled = value in (VALUES["speedup"], VALUES["efficiency"])
    efficiency = VALUES["efficiency"].read(row, rows) if scaled else None
    too_good = efficiency is not None and efficiency_above_one(efficiency.value, "") is not None
    return [*notes_of(row), *([noted("efficiency", efficiency.value)] if efficiency and too_good else [])]
