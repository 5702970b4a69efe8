"""The reference of lab files, docs/study_reference.md: every key, value, answer and kind of figure, from the code.

scripts/reference writes it.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from syncline.methods import METHODS
from syncline.plan import Plan
from syncline.study import answering
from syncline.study.file import (
    BestOf,
    Figure,
    Grade,
    OwnValue,
    Question,
    Quick,
    Stage,
    Study,
    Table,
    load_study,
)
from syncline.study.lab_code import LABS, built_in_labs, load_answers
from syncline.study.plan_keys import VIRTUAL
from syncline.study.values import VALUES, Value

SECTIONS: tuple[tuple[str, str, type[BaseModel]], ...] = (
    ("The top of the file", "Before the first section.", Study),
    ("[[stage]]", "A grid of cells, each of which is one run.", Stage),
    ("[stage.quick]", "Below a stage: what `--quick` changes in it.", Quick),
    ("best_of", "In a stage, `best_of = { stage = …, keys = […] }`.", BestOf),
    ("[[table]]", "", Table),
    ("[[figure]]", "", Figure),
    ("[[value]]", "A figure that your experiments put into their rows.", OwnValue),
    ("[[ask]]", "A question.", Question),
    ("[[grade]]", "What `--grade` compares; without any entry, what the tables show.", Grade),
)
FIGURE_KINDS = {
    "bars": "one group of bars for each value of `x`, one colour for each of `series` or `values`",
    "stacked": "one bar for each value of `x`, made of `values` that add up",
    "lines": "one line for each of `series`, along `x`",
    "boxes": "all timed steps of each value of `x`: median, quartiles and outliers",
    "loss": 'loss against step, one line for each training (`stage` with `run = "train"`); takes no values',
    "times": "the time of every timed step, one line for each row; takes no values",
    "timeline": "one typical step on every rank, for each row that `where` picks; takes no values",
    "schedules": "how each collective sends, round by round, as drawings; takes no stage and no values",
}
VIRTUAL_KEYS = {
    "nodes": "emulated hosts with `--hosts`, otherwise workers",
    "workers_per_node": "workers on each node; default 1",
    "batch_per_worker": "the global batch is this times the workers (weak scaling)",
    "batch_per_node": "the global batch is this times the nodes (weak scaling)",
}
HELPERS = (
    answering.read, answering.step_time, answering.step_text, answering.throughput, answering.no_difference,
    answering.best_value, answering.listed, answering.missing,
)  # fmt: skip


def reference() -> str:
    """The whole page."""
    lines = [
        "# Lab files: every key, value, answer and kind of figure", "",
        "Written from the code by `scripts/reference`; [labs.md](labs.md) shows how to use them.", "",
        *_sections(), *_figure_kinds(), *_values(), *_answers(), *_plan_keys(),
    ]  # fmt: skip
    return "\n".join(lines).rstrip() + "\n"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}", *(f"| {' | '.join(row)} |" for row in cells)]
    return [*lines, ""]


def _sections() -> list[str]:
    lines = ["## Keys", ""]
    for title, about, section in SECTIONS:
        lines += [f"### {title}", "", *([about, ""] if about else [])]
        lines += _table(["key", "holds", "default", "what"], _keys(section))
    return lines


def _keys(section: type[BaseModel], prefix: str = "") -> list[list[str]]:
    return [
        [f"`{prefix}{name}`", _holds(field.annotation), _default(field), _sentence(field.description or "")]
        for name, field in section.model_fields.items()
    ]


def _default(field: Any) -> str:
    if field.is_required():
        return "**required**"
    value = field.get_default(call_default_factory=True)
    if value is None or value is PydanticUndefined or isinstance(value, BaseModel) or value in ("", [], {}):
        return ""
    return f"`{json.dumps(value)}`"


def _holds(annotation: Any) -> str:
    """A type in words of a TOML file."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{json.dumps(word)}`" for word in inner)
    if origin in (Union, UnionType):
        return ", ".join(_holds(one) for one in inner if one is not NoneType)
    if origin in (list, tuple):
        words = _holds(inner[0])
        return f"list of {words}s" if words in ("text", "number", "section") else f"list of {words}"
    if origin is dict or (inspect.isclass(annotation) and issubclass(annotation, BaseModel)):
        return "section"
    if origin is not None and inner:  # a type with limits
        return _holds(inner[0])
    return {str: "text", bool: "`true`, `false`", int: "number", float: "number"}.get(annotation, "any value")


def _sentence(text: str) -> str:
    return " ".join(text.split())


def _figure_kinds() -> list[str]:
    kinds = get_args(Figure.model_fields["kind"].annotation)
    return [
        "## Kinds of figures",
        "",
        *_table(["kind", "shows"], [[f"`{kind}`", FIGURE_KINDS[kind]] for kind in kinds]),
    ]


def _values() -> list[str]:
    lines = [
        "## Values",
        "",
        "For `values` of tables and figures, `value` of grades, `by` of best_of, and `read` in answers.",
        "",
    ]
    lines += _table(["value", "label", "unit", "definition"], [_value(name, value) for name, value in VALUES.items()])
    lines += ["Of the labs' own experiments; their rows come from a stage that calls the same experiment:", ""]
    own = [(lab, one) for lab in built_in_labs() for one in load_study(lab)[1].value]
    rows = [[*_value(one.name, one.read_from_rows()), f"`{lab}`"] for lab, one in own]
    return [*lines, *_table(["value", "label", "unit", "definition", "lab"], rows)]


def _value(name: str, value: Value) -> list[str]:
    return [f"`{name}`", value.label, value.unit, value.definition]


def _answers() -> list[str]:
    lines = ["## Answers", "", "General ones, for any lab:", ""]
    lines += _table(["answer", "question"], [[f"`{name}`", _doc(one)] for name, one in answering.ANSWERS.items()])
    lines += ["Of the labs, which can be borrowed by name; each reads rows such as its own lab has:", ""]
    rows = [
        [f"`{name}`", _doc(one), f"`{lab}`"]
        for lab in built_in_labs()
        for name, one in load_answers(LABS / lab).items()
    ]
    lines += _table(["answer", "question", "lab"], rows)
    lines += ["Functions of `syncline.study.answering` for your own `answers.py`:", ""]
    helpers = [[f"`{one.__name__}({', '.join(inspect.signature(one).parameters)})`", _doc(one)] for one in HELPERS]
    return [*lines, *_table(["function", "what"], helpers)]


def _doc(function: Callable[..., Any]) -> str:
    return _sentence((inspect.getdoc(function) or "").partition("\n\n")[0])


def _plan_keys() -> list[str]:
    lines = [
        "## Plan keys",
        "",
        "For `[plan]`, `[quick]`, `plan` and `grid` of a stage, and `--set`. Besides the keys of a plan:",
        "",
    ]
    lines += _table(["key", "what"], [[f"`{key}`", VIRTUAL_KEYS[key]] for key in VIRTUAL])
    lines += ['The keys of a plan; those with a dot are quoted in TOML (`"options.bucket_cap_mb" = 5`):', ""]
    rows: list[list[str]] = []
    for row, (name, field) in zip(_keys(Plan), Plan.model_fields.items(), strict=True):
        section: Any = field.annotation
        nested = inspect.isclass(section) and issubclass(section, BaseModel)
        rows += _keys(section, f"{name}.") if nested else [row]
    lines += _table(["key", "holds", "default", "what"], rows)
    lines += [f"Methods: {', '.join(f'`{name}`' for name in METHODS)} ([methods.md](methods.md))."]
    return lines


if __name__ == "__main__":
    print(reference(), end="")
