"""Plan keys in a lab file: where they belong, and those that only a study has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import model_validator

from syncline.forms import Section
from syncline.plan import Plan

VIRTUAL = ("nodes", "workers_per_node", "batch_per_worker", "batch_per_node")
"""Keys of a study that a plan does not have."""


class PlanKeysApart(Section):
    """A section whose plan keys are in a section of their own: one written elsewhere is told where it belongs."""

    @model_validator(mode="before")
    @classmethod
    def _plan_keys_are_apart(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        for key in given:
            if key not in cls.model_fields and (key in Plan.model_fields or key in VIRTUAL):
                raise ValueError(f"{key} is a plan key: write it as plan = {{ {key} = … }}, or below [plan].")
        grid = given.get("grid")
        return {**given, "grid": _dotted(grid)} if isinstance(grid, Mapping) else given


def _dotted(grid: Mapping[str, Any]) -> dict[str, Any]:
    """TOML reads `options.groups = [1, 2]` as a section inside a section."""
    flat: dict[str, Any] = {}
    for key, values in grid.items():
        inner = _dotted(values) if isinstance(values, Mapping) else {}
        flat |= {f"{key}.{name}": value for name, value in inner.items()} if inner else {key: values}
    return flat
