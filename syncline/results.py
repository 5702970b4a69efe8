"""What use cases return: values to read in a script, tables to look at in a notebook."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncline.store import Run

if TYPE_CHECKING:
    import polars


class Tabular(ABC):
    """A result with one row per thing that was measured."""

    @property
    @abstractmethod
    def rows(self) -> Sequence[Mapping[str, Any]]:
        """As in the run's summary."""

    def table(self) -> polars.DataFrame:
        """The rows as a data frame; what is nested in a row becomes `outer_inner`."""
        import polars  # imported late: commands that print no frame need not wait for it

        return polars.json_normalize([dict(row) for row in self.rows], separator="_", infer_schema_length=None)

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


@dataclass(frozen=True, repr=False)
class Comparison(Tabular):
    """Methods side by side: one row each, with `step` times, `speedup` and the paired `ratio_to_ddp`."""

    run: Run

    @property
    def summary(self) -> dict[str, Any]:
        return self.run.summary

    @property
    def rows(self) -> list[dict[str, Any]]:
        return list(self.summary.get("rows", ()))


@dataclass(frozen=True, repr=False)
class Probe(Comparison):
    """Latency and rate between ranks: one row for each backend and operation, with points and a fitted line."""

    def table(self) -> polars.DataFrame:
        """One row for each backend, operation and message size."""
        import polars

        points = [
            {"backend": row["backend"], "operation": row["operation"], **point}
            for row in self.rows for point in row["points"]
        ]  # fmt: skip
        return polars.DataFrame(points, infer_schema_length=None)


@dataclass(frozen=True, repr=False)
class Certificates(Tabular):
    """One row for each world size, model and method."""

    certificates: list[dict[str, Any]]

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.certificates

    @property
    def holds(self) -> bool:
        """Whether every method computes what it should."""
        return all(row["passed"] for row in self.rows)


@dataclass(frozen=True, repr=False)
class Lab(Tabular):
    """A study that has run: its rows, the answer to its question, and the report."""

    folder: Path
    report: Path
    answer: str
    measured: list[dict[str, Any]]
    skipped: dict[str, str]
    """Cells that could not run here, and why."""

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.measured
