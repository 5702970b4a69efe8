"""A user's own model or data as module:callable."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from syncline.errors import PlanError


def search_also(folder: Path) -> None:
    """Find modules there too, after all other places. Ranks are given this process's search path."""
    if str(folder.resolve()) not in sys.path:
        sys.path.append(str(folder.resolve()))


@contextmanager
def searching(folder: Path) -> Iterator[None]:
    """The same for a while."""
    before = [*sys.path]
    search_also(folder)
    try:
        yield
    finally:
        sys.path[:] = before


def load_callable(name: str, what: str) -> Callable[..., Any]:
    """`what` is the plan's word for it: model or data."""
    module_name, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python script.py` would: people keep it where they stand
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise PlanError(
            f"cannot load {what} {name!r}: {error}.",
            action="Give module:callable, with the module in this folder or on PYTHONPATH.",
        ) from error
    if not callable(found):
        raise PlanError(f"{what} {name!r} is not callable.", action="Give a class or a function.")
    return found  # type: ignore[no-any-return]


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except ValueError:  # one of those written in C that do not say
        return {}


def accepted(function: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Of what is offered, that which the function has a parameter for."""
    parameters = parameters_of(function)
    return {name: value for name, value in offered.items() if name in parameters}
