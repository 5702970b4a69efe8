"""Footnotes: each note of a report is written below the first table that it concerns; every table has its letter
where it belongs: at the title if it concerns all numbers, at a row's name if it concerns all of the row's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from string import ascii_lowercase

from syncline.study.notes import Note, written_once
from syncline.study.tables import TableData


@dataclass(frozen=True)
class Marked:
    table: TableData
    title: list[str]
    """Letters at the title."""
    cells: list[list[list[str]]]
    """Letters at each cell."""
    said: list[tuple[str, Note]]
    """What is written below this table, with its letter: notes that no table before it has."""


def with_footnotes(tables: Iterable[TableData]) -> list[Marked]:
    tables = list(tables)
    notes = written_once(note for table in tables for line in table.notes for cell in line for note in cell)
    letters = {note.name: _letter(number) for number, note in enumerate(notes)}
    said: set[str] = set()
    marked = []
    for table in tables:
        own = {note.name for line in table.notes for cell in line for note in cell}
        new = [(letters[note.name], note) for note in notes if note.name in own - said]
        marked.append(Marked(table, *_places(table, letters), new))
        said |= own
    return marked


def _letter(number: int) -> str:
    return ascii_lowercase[number % 26] * (number // 26 + 1)


def _places(table: TableData, letters: dict[str, str]) -> tuple[list[str], list[list[list[str]]]]:
    """The letters at the title, and those at each cell."""
    cells = [[sorted({letters[note.name] for note in cell}) for cell in line] for line in table.notes]
    cells = cells or [[[] for _ in line] for line in table.rows]
    shown = [[number is not None for number in line] for line in table.numbers]
    title = _shared(
        cell for line, has in zip(cells, shown, strict=True) for cell, real in zip(line, has, strict=True) if real
    )
    cells = [[_without(cell, title) for cell in line] for line in cells]
    if table.num_keys:
        names = [_name(row[: table.num_keys]) for row in table.rows]
        cells = [_at_name(line, has, name) for line, has, name in zip(cells, shown, names, strict=True)]
    return title, cells


def _name(keys: Sequence[str]) -> int:
    """The last of the keys that is a word: a letter at a number would look like its power."""
    words = [column for column, key in enumerate(keys) if not key.replace(".", "").isdigit()]
    return words[-1] if words else len(keys) - 1


def _at_name(line: list[list[str]], has: Sequence[bool], name: int) -> list[list[str]]:
    everywhere = _shared(cell for cell, real in zip(line, has, strict=True) if real)
    line = [_without(cell, everywhere) for cell in line]
    return [everywhere if column == name else cell for column, cell in enumerate(line)]


def _shared(cells: Iterable[list[str]]) -> list[str]:
    sets = [set(cell) for cell in cells]
    return sorted(set.intersection(*sets)) if sets else []


def _without(cell: list[str], others: list[str]) -> list[str]:
    return [letter for letter in cell if letter not in others]
