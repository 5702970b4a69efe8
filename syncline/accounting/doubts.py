"""What makes a computed sentence doubtful, said in the sentence itself; or, where too much does, instead of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from syncline.accounting.ranking import listed, rank_times, sentence
from syncline.accounting.sanity import FEWEST_STEPS, OTHER_LOAD, Measured
from syncline.marks import Mark
from syncline.methods import method_of

TOO_MUCH_LOAD = 0.5
"""From this share of the cores' time on, what others took decides the times."""


@dataclass(frozen=True)
class Timed:
    """Steps of one method in one run, as the rules look at them."""

    seconds: Sequence[float]
    figures: Mapping[str, Any] = field(default_factory=dict)
    marks: tuple[Mark, ...] = ()
    point: Mapping[str, Any] = field(default_factory=dict)


def doubted(
    text: str,
    rows: Iterable[Measured],
    baselines: Iterable[tuple[Measured, Measured, float]] = (),
    *,
    refuses: bool = True,
) -> str:
    """The sentence with what is doubtful about its inputs in front; a refusal where others had most of the cores.

    `rows`: what it was computed from. `baselines`: rows with the ones that they were held against, and the efficiency
    that came out. A sentence that compares nothing need not be refused.
    """
    timed = [row for row in rows if row.seconds]
    if refuses and (why := refusal(timed)):
        return why
    found = [*_about_rows(timed), *_about_baselines(baselines)]
    return f"Measured with {listed(found)}: {text}" if found else text


def compared(rows: Sequence[Mapping[str, Any]], marks: Iterable[str]) -> str:
    """Which method is fastest, from the rows and marks of a comparison. Empty where only one was compared."""
    rivals = {row["label"]: row["seconds"] for row in rows if method_of(row["label"]).world != "worker"}
    if len(rivals) < 2:
        return ""
    known = tuple(map(Mark.parse, marks))
    timed = [Timed(row["seconds"], {"other_load": row.get("other_load")}, known) for row in rows]
    return doubted(f"{sentence(rank_times(rivals))}.", timed)


def refusal(rows: Iterable[Measured]) -> str | None:
    """The sentence that stands for any other, if the machine was overloaded."""
    share = max((_load(row) for row in rows), default=0.0)
    if share < TOO_MUCH_LOAD:
        return None
    return (
        f"No answer: other programs took {share:.0%} of the cores' time while this was measured, so these times say "
        "more about them than about the methods. Measure again on an idle machine: --when-busy wait waits for it."
    )


def _about_rows(rows: Sequence[Measured]) -> list[str]:
    found = []
    share = max((_load(row) for row in rows), default=0.0)
    if share > OTHER_LOAD:
        found.append(f"other programs on {share:.0%} of the cores")
    if any(_has(row, "stretched") for row in rows):
        found.append("workers that shared cores")
    if any(_has(row, "link") for row in rows):
        found.append("a link below its rate")
    fewest = min((len(row.seconds) for row in rows), default=FEWEST_STEPS)
    if fewest < FEWEST_STEPS:
        found.append("a single timed step" if fewest == 1 else f"only {fewest} timed steps")
    return found


def _about_baselines(baselines: Iterable[tuple[Measured, Measured, float]]) -> list[str]:
    found: dict[str, None] = {}
    for base, row, efficiency in baselines:
        if _has(row, "stretched") and not _has(base, "stretched"):
            found["a baseline that did not share its cores"] = None
        if abs(_load(row) - _load(base)) > OTHER_LOAD:
            found[f"a baseline under another load ({_load(base):.0%} against {_load(row):.0%})"] = None
        if efficiency > 1:
            found[f"a baseline that something slowed (efficiency {efficiency:.0%})"] = None
    return list(found)


def _load(row: Measured) -> float:
    return float(row.figures.get("other_load") or 0.0)


def _has(row: Measured, kind: str) -> bool:
    return any(mark.kind == kind for mark in row.marks)
