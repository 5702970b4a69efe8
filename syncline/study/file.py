"""A study is a file: a grid of plans, the measuring rules, and the tables, figures and questions drawn from them.

    title = "…"
    question = "…"
    answer = "fastest"            # a computed answer, see answering.py

    [plan]                        # what all cells share
    model = "vgg11"

    [[stage]]
    name = "methods"
    run = "compare"
    methods = ["single", "ddp"]
    grid = { nodes = [1, 2, 4] }  # one cell for each combination
    quick = { grid = { nodes = [1, 2] } }

    [[table]]
    title = "…"
    stage = "methods"
    rows = ["method"]
    columns = ["nodes"]
    values = ["step"]

Besides the keys of a plan, `nodes` (hosts where hosts are emulated, workers otherwise), `workers_per_node`,
`batch_per_worker` and `batch_per_node` are allowed; they become hosts, workers and global_batch.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self

from pydantic import Field, PrivateAttr, model_validator

from syncline.errors import PlanError
from syncline.forms import Section, checked
from syncline.methods import with_current_names
from syncline.study.answering import Answer
from syncline.study.lab_code import LABS, built_in_labs, find_answers, load_answers, resolve_call
from syncline.study.values import VALUES, Value, figure_value

LAB_FILE = "lab.toml"


class Quick(Section):
    """What `--quick` changes in a stage."""

    skip: str | None = None
    """Leave the stage out, for this reason."""
    plan: dict[str, Any] = Field(default_factory=dict)
    grid: dict[str, list[Any]] = Field(default_factory=dict)
    variants: dict[str, dict[str, Any]] = Field(default_factory=dict)
    methods: list[str] | None = None
    rounds: int | None = Field(None, ge=1)


class BestOf(Section):
    """Take the values of some grid keys from the best cell of an earlier stage."""

    stage: str
    keys: list[str] = Field(min_length=1)
    by: str = "throughput"
    each: list[str] = Field(default_factory=list)
    """Choose separately for each value of these keys, which this stage's grid has too."""


class Stage(Section):
    name: str
    run: Literal["compare", "train", "verify", "probe", "function"] = "compare"
    """compare: methods take turns in one world; train: one run per method; verify: certificates; probe: the link;
    function: `call` on every rank."""
    methods: list[str] = Field(default_factory=list)
    call: str | None = None
    """For run = "function": FILE.py:function, with the file beside the lab's, or module:function. Every rank calls it
    with what it joined; rank 0 returns rows."""
    plan: dict[str, Any] = Field(default_factory=dict)
    grid: dict[str, list[Any]] = Field(default_factory=dict)
    variants: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Plan keys that belong together, under a name: one cell for each, beside the grid."""
    best_of: BestOf | None = None
    fits: str | None = None
    """Leave out what is too large for the memory, by the bytes that this earlier stage measured."""
    replay: str | None = None
    """Replay the compute that this earlier stage recorded, for the same model and batch per worker: then only the
    network is real, and there may be more nodes than cores."""
    threads_per_core: float | None = Field(None, gt=0)
    """Leave out what has more compute threads than this for each core of a node: a grid for machines of any size."""
    rounds: int = Field(1, ge=1)
    """How often the whole grid is run, so that a noisy spell does not hit one cell alone."""
    quick: Quick = Quick()

    @model_validator(mode="after")
    def _keys_agree(self) -> Self:
        if (self.run == "function") != (self.call is not None):
            raise ValueError(f'stage {self.name}: run = "function" needs a call, and no other run has one.')
        for key, values in (*self.grid.items(), *self.quick.grid.items()):
            if not values:
                raise ValueError(f"stage {self.name}: grid key {key} has no values.")
        return self


class Table(Section):
    title: str
    kind: Literal["values", "losses"] = "values"
    """values: one line for each combination of `rows`; losses: every rank's loss lines of the stage's trainings."""
    stage: str
    rows: list[str] = Field(default_factory=lambda: ["method"])
    columns: list[str] = Field(default_factory=list)
    values: list[str] = Field(default_factory=list)
    where: dict[str, Any] = Field(default_factory=dict)
    """Only results with these values."""
    main: bool = False
    """On the first screen of the report."""
    note: str = ""

    @model_validator(mode="after")
    def _shows_something(self) -> Self:
        if (self.kind == "values") != bool(self.values):
            raise ValueError(f"table {self.title!r}: the kind values needs values; other kinds have none.")
        return self


class Figure(Section):
    title: str
    kind: Literal["bars", "stacked", "lines", "boxes", "loss", "times", "timeline", "schedules"]
    stage: str = ""
    x: str = "method"
    series: list[str] = Field(default_factory=list)
    values: list[str] = Field(default_factory=list)
    where: dict[str, Any] = Field(default_factory=dict)
    fit: Literal["amdahl", "gustafson"] | None = None
    """Beside each line of speed-ups, the law through it."""
    main: bool = False
    note: str = ""


class OwnValue(Section):
    """A figure that the lab's experiments put into their rows, for tables and figures to show."""

    name: str
    """Of the figure in the rows that an experiment returns."""
    label: str
    unit: Literal["s", "B", "B/s", "%", "x", "number"] = "number"
    """%: a share of one; x: a ratio."""
    definition: str
    """One sentence with the formula, shown with every table."""

    def read_from_rows(self) -> Value:
        unit = "" if self.unit == "number" else self.unit
        return figure_value(self.name, self.label, unit, self.definition)


class Question(Section):
    text: str
    answer: str
    """The name of a computed answer."""
    stage: str
    with_stages: list[str] = Field(default_factory=list)
    """Further stages that the answer looks at."""


class Study(Section):
    title: str
    question: str
    answer: str
    """The name of the computed answer to the question."""
    answer_stage: str
    about: str = ""
    """Where the experiment comes from."""
    plan: dict[str, Any] = Field(default_factory=dict)
    quick: dict[str, Any] = Field(default_factory=dict)
    """Plan keys that `--quick` changes in all stages."""
    stage: list[Stage] = Field(min_length=1)
    value: list[OwnValue] = Field(default_factory=list)
    table: list[Table] = Field(default_factory=list)
    figure: list[Figure] = Field(default_factory=list)
    question_: list[Question] = Field([], alias="ask")
    _own_answers: Mapping[str, Answer] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _names_exist(self) -> Self:
        names = [stage.name for stage in self.stage]
        _require_unique(names)
        uses: list[tuple[str, str]] = [(f"table {table.title!r}", table.stage) for table in self.table]
        uses += [(f"figure {figure.title!r}", figure.stage) for figure in self.figure if figure.stage]
        uses += [(f"question {ask.text!r}", stage) for ask in self.asks for stage in (ask.stage, *ask.with_stages)]
        uses.append(("answer_stage", self.answer_stage))
        for number, stage in enumerate(self.stage):
            best_of = stage.best_of.stage if stage.best_of is not None else None
            for key, other in (("best_of", best_of), ("replay", stage.replay), ("fits", stage.fits)):
                if other is not None and other not in names[:number]:
                    raise ValueError(f"stage {stage.name}: {key} must name an earlier stage, not {other!r}.")
        for what, name in uses:
            if name not in names:
                raise ValueError(f"{what}: unknown stage {name!r}; choose one of {', '.join(names)}.")
        for value in self.value:
            if value.name in VALUES:
                raise ValueError(f"Syncline already has a value {value.name!r}; choose another name.")
        known = [*(value.name for value in self.value), *VALUES, *(value.name for value in _built_in_values())]
        shown = [*(table.values for table in self.table), *(figure.values for figure in self.figure)]
        for name in sorted({name for names in shown for name in names} - set(known)):
            raise ValueError(f"unknown value {name!r}; choose one of {', '.join(dict.fromkeys(known))}.")
        return self

    @property
    def asks(self) -> list[Question]:
        return self.question_

    @property
    def answer_names(self) -> set[str]:
        return {self.answer, *(ask.answer for ask in self.asks)}

    def answers(self) -> Mapping[str, Answer]:
        """Every answer that the study names."""
        return find_answers(self.answer_names, self._own_answers)

    def values(self) -> Mapping[str, Value]:
        """What its tables and figures may show: general values, those of the labs of Syncline, and its own."""
        declared = (*_built_in_values(), *self.value)
        return {**VALUES, **{value.name: value.read_from_rows() for value in declared}}

    def with_settings(self, settings: Mapping[str, Any]) -> Study:
        """These plan keys in every cell, whatever the file says; a key that a grid varies stays varied."""

        def changed(stage: Stage) -> Stage:
            quick = stage.quick.model_copy(update={"plan": {**stage.quick.plan, **settings}})
            return stage.model_copy(update={"plan": {**stage.plan, **settings}, "quick": quick})

        return self.model_copy(update={"stage": [changed(stage) for stage in self.stage]})


@cache
def _built_in_values() -> tuple[OwnValue, ...]:
    files = [tomllib.loads((LABS / name / LAB_FILE).read_text()) for name in built_in_labs()]
    return tuple(OwnValue(**value) for file in files for value in file.get("value", []))


def _require_unique(names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"two stages are called {name!r}.")
        seen.add(name)


def load_study(name: str) -> tuple[str, Study]:
    """A built-in lab by name, or by path a lab's folder or a study file: its short name and the study."""
    built_in = name in built_in_labs()
    path = LABS / name if built_in else Path(name)
    folder = path if path.is_dir() else path.parent if path.name == LAB_FILE else None
    file = path if folder is None else folder / LAB_FILE
    if not file.is_file():
        problem = f"{name!r} is neither a lab nor a file" if folder is None else f"{name} has no {LAB_FILE}"
        known = ", ".join(built_in_labs())
        raise PlanError(f"{problem}.", action=f"Choose one of {known}, a folder with a {LAB_FILE}, or a TOML file.")
    short = path.stem if folder is None else folder.resolve().name
    own = {} if folder is None else load_answers(folder)
    return short, parse_study(file.read_text(), f"lab {name}" if built_in else str(file), file.parent, own)


def parse_study(
    text: str, where: str, folder: Path = Path(), own: Mapping[str, Answer] = MappingProxyType({})
) -> Study:
    """`folder` is where the files that its stages call lie; `own` are the answers of the lab's answers.py."""
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PlanError(f"{where} is not valid TOML: {error}.") from error
    study = checked(Study, with_current_names(values), where)
    stages = [
        stage if stage.call is None else stage.model_copy(update={"call": resolve_call(stage.call, folder)})
        for stage in study.stage
    ]
    study = study.model_copy(update={"stage": stages})
    study._own_answers = own
    find_answers(study.answer_names, own)
    return study
