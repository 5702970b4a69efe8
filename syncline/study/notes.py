"""Notes: what makes a number doubtful, in words that fit every row of which it is true. A report writes each of them
once; its tables point to it from the cells that it concerns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from syncline.accounting import sanity
from syncline.study.rows import Row


@dataclass(frozen=True)
class Note:
    rule: str
    text: str
    size: float = 0.0
    """How much of it there is: of several notes of one name, the one with most speaks for all."""

    @property
    def name(self) -> str:
        """What is one note in a report. Marks of one kind can say different things; a rule says one."""
        return self.rule if self.rule in RULES else f"{self.rule}: {self.text}"


RULES = {
    "too few steps": f"Fewer than {sanity.FEWEST_STEPS} timed steps, too few to trust a median.",
    "warm-up": "The first timed step is much slower than the others: the timed steps include a warm-up step.",
    "ranks disagree": "The ranks measured different lengths of one step, so one of them leaves something out.",
    "denominator": "The average divides by another number than that of the iterations that ran.",
    "outliers": "Steps that took more than twice the usual time; the parts and their mean leave them out.",
    "uneven steps": "Steps differ so much that their mean, to which the parts add up, lies far above the median.",
    "other load": "Up to {size:.0%} of the cores' time went to other processes or virtual machines during the run.",
    "efficiency": "Up to {size:.0%} efficiency is more than the workers can give; suspect the baseline "
    "(other threads, colder caches, another load).",
}


def notes_of(row: Row) -> list[Note]:
    """What a reader must know beside any time of this row."""
    broken = [warning.rule for warning in sanity.check_rows([row]) if warning.rule in RULES]
    load = row.figures.get("other_load") or 0.0
    found = [noted(rule, load if rule == "other load" else 0.0) for rule in broken]
    return [*found, *(Note(*_split(mark.text)) for mark in row.marks)]


def noted(rule: str, size: float = 0.0) -> Note:
    return Note(rule, RULES[rule].format(size=size), size)


def _split(mark: str) -> tuple[str, str]:
    kind, _, text = mark.partition(": ")
    return kind, f"{text[:1].upper()}{text[1:]}."


def written_once(notes: Iterable[Note]) -> list[Note]:
    """Each name once, in the order of its first mention."""
    kept: dict[str, Note] = {}
    for note in notes:
        if note.name not in kept or note.size > kept[note.name].size:
            kept[note.name] = note
    return list(kept.values())
