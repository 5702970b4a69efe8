"""Forms: what a user's file may hold. An error names the key as the user wrote it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from syncline.errors import PlanError
from syncline.units import printable

LARGEST = 2**63
LONGEST_NAME = 255
"""Bytes between two slashes, on every common file system."""


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


Form = TypeVar("Form", bound=Section)


def checked(form: type[Form], values: Mapping[str, Any], what: str) -> Form:
    """The values as a Section, or a PlanError that names every wrong key in `what`."""
    _check_sizes(values)
    try:
        return form.model_validate(values)
    except ValidationError as error:
        raise PlanError(" ".join(_explain(problem, form, what) for problem in error.errors())) from None


def _check_sizes(value: Any, key: str = "") -> None:
    """Before any other rule: numbers that no computer counts with, and names that no file system takes."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            _check_sizes(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_sizes(inner, key)
    elif isinstance(value, int | float) and not abs(value) < LARGEST:
        raise PlanError(f"{key}: {str(value)[:30]} is not a number to count with.")
    elif isinstance(value, str):
        longest = max(len(name.encode(errors="replace")) for name in value.split("/"))
        if longest > LONGEST_NAME and not any(letter.isspace() for letter in value):  # a text to read is no name
            raise PlanError(f"{key}: {printable(value[:30])}… is longer than the {LONGEST_NAME} bytes of a name.")


def _explain(problem: ErrorDetails, form: type[BaseModel], what: str) -> str:
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"unknown key {key!r} in {what}. {_nearest(key, _keys_beside(form, problem['loc']))}"
    if problem["type"] == "missing" and isinstance(problem["loc"][-1], int):
        name = ".".join(str(part) for part in problem["loc"][:-1])
        return f"{name} in {what}: too few values; number {problem['loc'][-1] + 1} is missing."
    if problem["type"] == "missing":
        return f"{_place(problem['loc'][:-1], problem['input'], what)}: missing key {problem['loc'][-1]!r}."
    if problem["type"] == "literal_error":
        allowed = [word.strip("' ") for word in problem["ctx"]["expected"].replace(" or ", ",").split(",")]
        return f"{key}: {unknown_value(str(problem['input']), allowed)}"
    if problem["type"] == "value_error":
        return f"{key}: {problem['ctx']['error']}" if key else str(problem["ctx"]["error"])
    if problem["type"] == "model_type":
        return f"{key} is a section, not {problem['input']!r}."
    return f"{key}: {problem['msg'].removeprefix('Input ')}, not {problem['input']!r}."


def _place(location: tuple[int | str, ...], section: Any, what: str) -> str:
    """lab.toml, [[table]] number 2 ("Step time"): as a reader of the file would look for it."""
    words = [what]
    for part, following in pairwise((*location, None)):
        if isinstance(part, str):
            words.append(f"[[{part}]] number {following + 1}" if isinstance(following, int) else str(part))
    names = [section[key] for key in ("name", "title", "text") if isinstance(section, Mapping) and key in section]
    return ", ".join(words) + (f" ({str(names[0])!r})" if names and location else "")


def unknown_value(value: str, allowed: Iterable[str]) -> str:
    return f"unknown value {value!r}. {_nearest(value, allowed)}"


def _nearest(word: str, allowed: Iterable[str]) -> str:
    allowed = list(allowed)
    close = difflib.get_close_matches(word, allowed, n=1, cutoff=0.5)
    question = f"Did you mean {close[0]!r}? " if close else ""
    return f"{question}Choose one of {', '.join(allowed)}."


def _keys_beside(form: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """The valid keys in the place of an unknown one."""
    section = form
    for part in location[:-1]:
        if isinstance(part, str):
            section = _section_of(section.model_fields[part].annotation)
    prefix = "".join(f"{part}." for part in location[:-1])
    return [prefix + name for name in section.model_fields]


def _section_of(annotation: Any) -> type[BaseModel]:
    """The section in `Section`, `list[Section]` or `Section | None`."""
    if isinstance(annotation, type) and not get_args(annotation):
        return annotation
    return next(_section_of(inner) for inner in get_args(annotation) if inner is not type(None))
