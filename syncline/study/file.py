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
With `link = "1gbit"` at the top, nodes are emulated hosts.
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
from syncline.study.plan_keys import PlanKeysApart
from syncline.study.values import VALUES, Value, figure_value

LAB_FILE = "lab.toml"
OF_A_MACHINE = ("s", "B/s", "samples/s")
"""Units of values that every machine has its own of."""


class Quick(PlanKeysApart):
    """What `--quick` changes in a stage."""

    skip: str | None = None
    """Leave the stage out, for this reason."""
    plan: dict[str, Any] = Field(default_factory=dict)
    """Plan keys to change; the others stay."""
    grid: dict[str, list[Any]] = Field(default_factory=dict)
    """Grid keys to change; the others stay."""
    variants: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """In place of the stage's variants."""
    methods: list[str] | None = None
    """In place of the stage's methods."""
    rounds: int | None = Field(None, ge=1)
    """In place of the stage's rounds."""


class BestOf(Section):
    """Take the values of some grid keys from the best cell of an earlier stage."""

    stage: str
    """The earlier stage."""
    keys: list[str] = Field(min_length=1)
    """Keys that it varied."""
    by: str = "throughput"
    """The value that decides: the highest, or of a time the lowest."""
    each: list[str] = Field(default_factory=list)
    """Choose separately for each value of these keys, which this stage's grid has too."""


class Stage(PlanKeysApart):
    name: str
    """By which tables, figures and questions refer to it."""
    run: Literal["compare", "train", "verify", "probe", "function"] = "compare"
    """compare: methods take turns in one world; train: one run per method; verify: certificates; probe: the link;
    function: `call` on every rank."""
    methods: list[str] = Field(default_factory=list)
    """Methods to run: they take turns in a comparison and have a cell each in trainings."""
    call: str | None = None
    """For run = "function": FILE.py:function, with the file beside the lab's, or module:function. Every rank calls it
    with what it joined; rank 0 returns rows."""
    plan: dict[str, Any] = Field(default_factory=dict)
    """Plan keys of this stage, over those of the lab."""
    grid: dict[str, list[Any]] = Field(default_factory=dict)
    """Keys to vary and their values: one cell for each combination."""
    variants: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Plan keys that belong together, under a name: one cell for each, beside the grid."""
    best_of: BestOf | None = None
    """Take the best values of an earlier stage."""
    fits: str | None = None
    """Leave out what is too large for the memory, by the bytes that this earlier stage measured."""
    replay: str | None = None
    """Replay the compute that this earlier stage recorded, for the same model and batch per worker: then only the
    network is real, and there may be more nodes than cores."""
    alone: list[str] = Field(default_factory=list)
    """Only these methods where there is one worker, which sends nothing, whatever the method; default all."""
    loopback: bool = False
    """Nodes are processes of this machine here, also where those of other stages are emulated hosts: for stages that
    ask nothing of the network."""
    threads_per_core: float | None = Field(None, gt=0)
    """Leave out what has more compute threads than this for each core of a node: a grid for machines of any size."""
    rounds: int = Field(1, ge=1)
    """How often the whole grid is run, so that a noisy spell does not hit one cell alone."""
    quick: Quick = Quick()
    """What `--quick` changes."""

    @model_validator(mode="after")
    def _keys_agree(self) -> Self:
        if (self.run == "function") != (self.call is not None):
            raise ValueError(f'stage {self.name}: run = "function" needs a call, and no other run has one.')
        if unknown := [name for name in self.alone if name not in self.methods]:
            raise ValueError(f"stage {self.name}: alone names {unknown[0]!r}, which is not one of its methods.")
        for key, values in (*self.grid.items(), *self.quick.grid.items()):
            if not values:
                raise ValueError(f"stage {self.name}: grid key {key} has no values.")
        return self


class Table(Section):
    title: str
    """Of the table."""
    kind: Literal["values", "losses", "accuracies"] = "values"
    """values: one line for each combination of `rows`; losses: every rank's loss lines of the stage's trainings;
    accuracies: every rank's own loss and accuracy at their end."""
    stage: str
    """The stage whose results it shows."""
    rows: list[str] = Field(default_factory=lambda: ["method"])
    """Keys: one line for each combination of their values."""
    columns: list[str] = Field(default_factory=list)
    """Keys: each value in one column for each combination of their values."""
    values: list[str] = Field(default_factory=list)
    """Values to show, by name."""
    where: dict[str, Any] = Field(default_factory=dict)
    """Only results with these values."""
    main: bool = False
    """On the first screen of the report."""
    note: str = ""
    """A sentence below it."""

    @model_validator(mode="after")
    def _shows_something(self) -> Self:
        if (self.kind == "values") != bool(self.values):
            raise ValueError(f"table {self.title!r}: the kind values needs values; other kinds have none.")
        return self


class Figure(Section):
    title: str
    """Of the figure."""
    kind: Literal["bars", "stacked", "lines", "boxes", "loss", "times", "timeline", "schedules"]
    """How it is drawn."""
    stage: str = ""
    """The stage whose results it shows."""
    x: str = "method"
    """The key along the axis."""
    series: list[str] = Field(default_factory=list)
    """Keys: one line, or one colour of bars, for each combination of their values."""
    values: list[str] = Field(default_factory=list)
    """Values to show, by name."""
    where: dict[str, Any] = Field(default_factory=dict)
    """Only results with these values."""
    fit: Literal["amdahl", "gustafson"] | None = None
    """Beside each line of speed-ups, the law through it."""
    main: bool = False
    """On the first screen of the report."""
    note: str = ""
    """A sentence below it."""


class OwnValue(Section):
    """A figure that the lab's experiments put into their rows, for tables and figures to show."""

    name: str
    """Of the figure in the rows that an experiment returns."""
    label: str
    """What tables and figures call it."""
    unit: Literal["s", "B", "B/s", "%", "x", "number"] = "number"
    """%: a share of one; x: a ratio."""
    definition: str
    """One sentence with the formula, shown with every table."""

    def read_from_rows(self) -> Value:
        unit = "" if self.unit == "number" else self.unit
        return figure_value(self.name, self.label, unit, self.definition)


class Question(Section):
    text: str
    """The question, as the report and the sheet print it."""
    points: float | None = Field(None, ge=0)
    """What a full answer is worth."""
    answer: str | None = None
    """The name of a computed answer, general or a function in answers.py. Without it, nothing is computed."""
    solution: str = ""
    """Your own answer in words: printed below the computed one, left out by --no-answers and on the sheet."""
    stage: str = ""
    """The stage that the question is about. A computed answer reads its rows."""
    with_stages: list[str] = Field(default_factory=list)
    """Further stages that the answer looks at."""

    @model_validator(mode="after")
    def _answer_has_rows(self) -> Self:
        _require_name(self.answer)
        if self.answer is not None and not self.stage:
            raise ValueError(f"question {self.text!r}: answer = {self.answer!r} needs a stage to read.")
        return self

    @property
    def heading(self) -> str:
        return self.text if self.points is None else f"{self.text} ({format_points(self.points)})"


def format_points(points: float) -> str:
    return "1 point" if points == 1 else f"{points:g} points"


class Grade(Section):
    """What `--grade` compares with a reference run."""

    stage: str
    """The stage whose rows are compared."""
    value: str
    """The value to compare, by name."""
    kind: Literal["number", "order"] = "number"
    """number: the value of each row, which must be no time; order: which rows have less of it, also of a time."""
    by: str = "method"
    """For an order: the key whose values are put in order; the others stay the same."""
    where: dict[str, Any] = Field(default_factory=dict)
    """Only results with these values."""
    tolerance: float | None = Field(None, ge=0)
    """How far a number may be off: a share of the reference's (default 0.25, of a loss 0.05), or of a value in % that
    many hundredths (default 0.1 for 10 %). Of an order: how much two must differ in the reference to count (0.1)."""


class Study(PlanKeysApart):
    title: str
    """Of the lab and its report."""
    question: str
    """The main question, at the top of the report."""
    answer: str | None = None
    """The name of the computed answer to the main question. Without it, the question is open."""
    answer_stage: str = ""
    """The stage whose rows that answer reads."""
    answer_with_stages: list[str] = Field(default_factory=list)
    """Further stages that the answer looks at."""
    solution: str = ""
    """Your own answer to the main question in words, printed below the computed one."""
    about: str = ""
    """Where the experiment comes from."""
    link: str | None = None
    """Nodes are emulated hosts with links of this rate, unless somebody asks for others or for none, or this machine
    allows no emulated hosts."""
    scripts: str | None = None
    """The stage whose settings the programs beside the report have: those made of the templates in scripts/."""
    plan: dict[str, Any] = Field(default_factory=dict)
    """Plan keys that all cells share."""
    quick: dict[str, Any] = Field(default_factory=dict)
    """Plan keys that `--quick` changes in all stages."""
    stage: list[Stage] = Field(min_length=1)
    """What is run, in this order."""
    value: list[OwnValue] = Field(default_factory=list)
    """Figures of your own experiments, for tables and figures to show."""
    table: list[Table] = Field(default_factory=list)
    """Tables of the report."""
    figure: list[Figure] = Field(default_factory=list)
    """Figures of the report."""
    ask: list[Question] = Field(default_factory=list)
    """Further questions."""
    grade: list[Grade] = Field(default_factory=list)
    """What `--grade` compares; by default what the tables show."""
    _own_answers: Mapping[str, Answer] = PrivateAttr(default_factory=dict)
    _folder: Path | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _names_exist(self) -> Self:
        names = [stage.name for stage in self.stage]
        _require_unique(names)
        uses: list[tuple[str, str]] = [(f"table {table.title!r}", table.stage) for table in self.table]
        uses += [(f"figure {figure.title!r}", figure.stage) for figure in self.figure if figure.stage]
        read = [(ask, stage) for ask in self.asks for stage in (ask.stage, *ask.with_stages)]
        uses += [(f"grade of {entry.value}", entry.stage) for entry in self.grade]
        uses += [(f"question {ask.text!r}", stage) for ask, stage in read if stage]
        uses += [("answer_stage", self.answer_stage)] if self.answer_stage else []
        uses += [("answer_with_stages", stage) for stage in self.answer_with_stages]
        uses += [("scripts", self.scripts)] if self.scripts is not None else []
        for number, stage in enumerate(self.stage):
            best_of = stage.best_of.stage if stage.best_of is not None else None
            for key, other in (("best_of", best_of), ("replay", stage.replay), ("fits", stage.fits)):
                if other is not None and other not in names[:number]:
                    raise ValueError(f"stage {stage.name}: {key} must name an earlier stage, not {other!r}.")
        _require_name(self.answer)
        if self.answer is not None and not self.answer_stage:
            raise ValueError(f"answer = {self.answer!r} needs an answer_stage; choose one of {', '.join(names)}.")
        for what, name in uses:
            if name not in names:
                raise ValueError(f"{what}: unknown stage {name!r}; choose one of {', '.join(names)}.")
        for value in self.value:
            if value.name in VALUES:
                raise ValueError(f"Syncline already has a value {value.name!r}; choose another name.")
        known = [*(value.name for value in self.value), *VALUES, *(value.name for value in _built_in_values())]
        shown = [*(table.values for table in self.table), *(figure.values for figure in self.figure)]
        shown += [[entry.value] for entry in self.grade]
        for name in sorted({name for names in shown for name in names} - set(known)):
            raise ValueError(f"unknown value {name!r}; choose one of {', '.join(dict.fromkeys(known))}.")
        for entry in self.grade:
            if entry.kind == "number" and self.values()[entry.value].unit in OF_A_MACHINE:
                raise ValueError(
                    f"grade of {entry.value}: times and rates differ between machines; grade a ratio such as "
                    'speedup, or kind = "order".'
                )
        return self

    @property
    def asks(self) -> list[Question]:
        return self.ask

    @property
    def folder(self) -> Path | None:
        """Where its file lies."""
        return self._folder

    @property
    def answer_names(self) -> set[str]:
        return {name for name in (self.answer, *(ask.answer for ask in self.asks)) if name is not None}

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


def _require_name(answer: str | None) -> None:
    if answer is not None and len(answer.split()) != 1:
        raise ValueError(f"answer = {answer!r} is not the name of a computed answer; own words are a solution.")


def _require_unique(names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"two stages are called {name!r}.")
        seen.add(name)


def load_study(name: str) -> tuple[str, Study]:
    """A built-in lab by name, or by path a lab's folder or a study file: its short name and the study."""
    file, folder = find_study(name)
    short = file.stem if folder is None else folder.resolve().name
    own = {} if folder is None else load_answers(folder)
    where = f"lab {name}" if name in built_in_labs() else str(file)
    return short, parse_study(file.read_text(), where, file.parent, own)


def find_study(name: str) -> tuple[Path, Path | None]:
    """The file of a lab, and its folder if it has one of its own."""
    path = LABS / name if name in built_in_labs() else Path(name)
    folder = path if path.is_dir() else path.parent if path.name == LAB_FILE else None
    file = path if folder is None else folder / LAB_FILE
    if not file.is_file():
        problem = f"{name!r} is neither a lab nor a file" if folder is None else f"{name} has no {LAB_FILE}"
        known = ", ".join(built_in_labs())
        raise PlanError(f"{problem}.", action=f"Choose one of {known}, a folder with a {LAB_FILE}, or a TOML file.")
    return file, folder


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
    study._folder = folder
    find_answers(study.answer_names, own)
    return study
