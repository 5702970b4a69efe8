"""Forms: what a user's file may hold. An error names the key as the user wrote it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from syncline.errors import PlanError


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


Form = TypeVar("Form", bound=Section)


def checked(form: type[Form], values: Mapping[str, Any], what: str) -> Form:
    """The values as a Section, or a PlanError that names every wrong key in `what`."""
    try:
        return form.model_validate(values)
    except ValidationError as error:
        raise PlanError(" ".join(_explain(problem, form, what) for problem in error.errors())) from None


def _explain(problem: ErrorDetails, form: type[BaseModel], what: str) -> str:
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"unknown key {key!r} in {what}. {_nearest(key, _keys_beside(form, problem['loc']))}"
    if problem["type"] == "literal_error":
        allowed = [word.strip("' ") for word in problem["ctx"]["expected"].replace(" or ", ",").split(",")]
        return f"{key}: {unknown_value(str(problem['input']), allowed)}"
    if problem["type"] == "value_error":
        return f"{key}: {problem['ctx']['error']}" if key else str(problem["ctx"]["error"])
    if problem["type"] == "model_type":
        return f"{key} is a section, not {problem['input']!r}."
    return f"{key}: {problem['msg'].removeprefix('Input ')}, not {problem['input']!r}."


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
