"""How an event log is stored: blocks of columns, each whole by itself.

A block is a mark, the length and the checksum of what follows, and that: records that have the same fields make a
group, and each field of a group is a column. Whole numbers are stored as differences (a start from the end before it,
an end from its start), since these have few digits, and cut into planes of bytes; words as numbers in a list of the
words. All is compressed. A log cut at any byte gives every whole block; one that was damaged loses only the blocks
that are.

What is read is checked for form, so a damaged or foreign file is no danger, but not for sense: see events.py.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

Record = dict[str, Any]
Ints = NDArray[np.int64]

MARK = b"\x89SLb"
HEAD = struct.Struct("<4sII")
SIZE = struct.Struct("<I")
LARGEST = 1 << 26
"""Bytes of a block, before and after compression: what claims more is damaged."""
COMMON = json.dumps(
    [["seq", "kind", "name", "start", "end", "step", "method", "label", "bytes", "ready", "busy", "value", "samples"],
     ["learning_rate", "sent", "received", "repeated", "interface_sent", "interface_received", "phase", "collective"],
     ["pack", "loss", "counter", "data", "copy", "forward", "score", "backward", "sync", "update", "all_reduce"]],
).encode()  # fmt: skip
"""The words of most logs, so that small blocks need not hold them. Part of the format."""
DAMAGED = (ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError, MemoryError, struct.error)


@dataclass(frozen=True)
class Words:
    """A column of anything but numbers."""

    values: list[Any]
    codes: NDArray[Any]

    def __getitem__(self, rows: Any) -> Words:
        return Words(self.values, self.codes[rows])

    def tolist(self) -> list[Any]:
        return [self.values[code] for code in self.codes.tolist()]


Column = NDArray[Any] | Words


@dataclass(frozen=True)
class Group:
    """Records with the same fields. `places`: where each stands among all records."""

    places: NDArray[Any]
    columns: dict[str, Column]

    def __len__(self) -> int:
        return len(self.places)

    def rows(self, chosen: Any) -> Group:
        return Group(self.places[chosen], {name: column[chosen] for name, column in self.columns.items()})

    def records(self) -> list[Record]:
        names = tuple(self.columns)
        columns = (column.tolist() for column in self.columns.values())
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def in_order(groups: Sequence[Group]) -> list[Record]:
    """The records of all groups as they were noted."""
    placed = chain.from_iterable(zip(group.places.tolist(), group.records(), strict=True) for group in groups)
    return [record for _, record in sorted(placed, key=lambda pair: pair[0])]


def group_records(records: Sequence[Record]) -> list[Group]:
    rows: dict[tuple[str, ...], list[Any]] = {}
    numbers: dict[tuple[str, ...], int] = {}
    order = []
    for record in records:
        names = tuple(record)
        if names not in numbers:
            numbers[names], rows[names] = len(numbers), []
        order.append(numbers[names])
        rows[names].append(record.values())
    placed = np.array(order, np.int64)
    return [
        Group(
            np.flatnonzero(placed == numbers[names]),
            dict(zip(names, map(_column, zip(*own, strict=True)), strict=True)),
        )
        for names, own in rows.items()
    ]


def _column(values: tuple[Any, ...]) -> Column:
    kinds = set(map(type, values))
    if kinds == {int}:
        try:
            return np.array(values, np.int64)
        except OverflowError:
            pass
    if kinds == {float}:
        return np.array(values, np.float64)
    if kinds == {str}:
        return Words(*_numbered(values))
    words, codes = _numbered([json.dumps(value) for value in values])  # 1, 1.0 and true are three words
    return Words([json.loads(word) for word in words], codes)


def _numbered(words: Sequence[str]) -> tuple[list[str], Ints]:
    different = list(dict.fromkeys(words))
    if len(different) == 1:
        return different, np.zeros(len(words), np.int64)
    numbers = {word: number for number, word in enumerate(different)}
    return different, np.array([numbers[word] for word in words], np.int64)


# Writing.


def encode(records: Sequence[Record]) -> bytes:
    """One block; at most some thousand records."""
    body = body_of(records)
    return HEAD.pack(MARK, len(body), zlib.crc32(body)) + body


def body_of(records: Sequence[Record]) -> bytes:
    groups = group_records(records)
    order = np.empty(len(records), np.int64)
    for number, group in enumerate(groups):
        order[group.places] = number
    width, planes = _planes(order)
    about: list[Any] = [len(records), width]
    content = [planes]
    for group in groups:
        described: list[list[Any]] = []
        for name, column in group.columns.items():
            if isinstance(column, np.ndarray) and column.dtype == np.float64:
                described.append([name, "float"])
                content.append(_bytes_of(column.view(np.uint8).reshape(-1, 8)))
                continue
            width, planes = _planes(_differences(name, group.columns))
            described.append([name, width, *([column.values] if isinstance(column, Words) else [])])
            content.append(planes)
        about.append(described)
    said = json.dumps(about, separators=(",", ":")).encode()
    squeeze = zlib.compressobj(6, zdict=COMMON)
    return squeeze.compress(b"".join([SIZE.pack(len(said)), said, *content])) + squeeze.flush()


def _differences(name: str, columns: Mapping[str, Any]) -> Ints:
    """Of a time from the nearest other one, and of anything else from the record before."""
    own: Ints = columns[name].codes if isinstance(columns[name], Words) else columns[name]
    if _has_span(columns) and not isinstance(columns[name], Words):
        start: Ints = columns["start"]
        end: Ints = columns["end"]
        if name == "start":
            return np.concatenate([own[:1], start[1:] - end[:-1]])
        if name == "end":
            return own - start
        if name == "ready":
            return start - own
        if name == "busy":
            return end - start - own
    return np.concatenate([own[:1], own[1:] - own[:-1]])


def _restored(name: str, differences: Ints, columns: Mapping[str, Any], lengths: Ints | None) -> Ints:
    """The other way round; `lengths`: of the spans, where the group has them."""
    if lengths is not None:
        if name == "start":
            return np.cumsum(differences + np.concatenate([np.zeros(1, np.int64), lengths[:-1]])[: len(lengths)])
        start: Ints = columns["start"]
        if name == "end":
            return start + differences
        if name == "ready":
            return start - differences
        if name == "busy":
            return lengths - differences
    return np.cumsum(differences)


def _has_span(columns: Mapping[str, Any]) -> bool:
    return all(getattr(columns.get(name), "dtype", None) == np.int64 for name in ("start", "end"))


def _planes(numbers: Ints) -> tuple[int, bytes]:
    """Each number's first bytes, then each one's second, …: those that are alike lie together."""
    folded = ((numbers << 1) ^ (numbers >> 63)).view(np.uint64)  # small negative numbers have few bytes too
    width = (int(folded.max(initial=0)).bit_length() + 7) // 8
    return width, _bytes_of(folded.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :width])


def _bytes_of(table: NDArray[np.uint8]) -> bytes:
    return np.ascontiguousarray(table.T).tobytes()


# Reading.


def bodies_of(content: bytes) -> Iterator[bytes | None]:
    """The body of each block in order; None where bytes belong to no whole block."""
    at = 0
    while at < len(content):
        body = body_at(content, at)
        if body is not None:
            at += HEAD.size + len(body)
        else:
            at = content.find(MARK, at + 1)
            at = len(content) if at < 0 else at
        yield body


def body_at(content: bytes, at: int) -> bytes | None:
    """Of the block that begins there; None if none does, or it is cut short or damaged."""
    if len(content) - at < HEAD.size:
        return None
    mark, length, check = HEAD.unpack_from(content, at)
    body = content[at + HEAD.size : at + HEAD.size + length]
    is_whole = mark == MARK and length <= LARGEST and len(body) == length and zlib.crc32(body) == check
    return body if is_whole else None


def decode(body: bytes) -> list[Group] | None:
    """None for what was written whole but makes no sense."""
    try:
        squeezed = zlib.decompressobj(zdict=COMMON)
        content = squeezed.decompress(body, LARGEST)
        return _groups(content) if squeezed.eof else None
    except (zlib.error, *DAMAGED):
        return None


def _groups(content: bytes) -> list[Group]:
    (length,) = SIZE.unpack_from(content)
    count, width, *described = json.loads(content[SIZE.size : SIZE.size + length])
    take = _Taker(content, SIZE.size + length)
    order = take.numbers(count, width)
    groups = []
    for number, fields in enumerate(described):
        places = np.flatnonzero(order == number)
        raw = {
            name: take.floats(len(places)) if width == "float" else take.numbers(len(places), width)
            for name, width, *_ in fields
        }
        words = {name: more[0] for name, _, *more in fields if more}
        lengths: Any = raw["end"] if _has_span(raw) and not words.keys() & {"start", "end"} else None
        groups.append(Group(places, _restored_columns(raw, words, lengths)))
    if sum(map(len, groups)) != count:
        raise ValueError("records without a group")
    return groups


def _restored_columns(raw: dict[str, Any], words: dict[str, list[Any]], lengths: Ints | None) -> dict[str, Column]:
    columns: dict[str, Any] = {}
    for name in sorted(raw, key=lambda name: name != "start"):  # others count from it
        if raw[name].dtype == np.float64:
            columns[name] = raw[name]
            continue
        numbers = _restored(name, raw[name], columns, None if name in words else lengths)
        if name in words:
            if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < len(words[name]):
                raise ValueError("a word that is not in the list")
            columns[name] = Words(words[name], numbers)
        else:
            columns[name] = numbers
    return {name: columns[name] for name in raw}


class _Taker:
    """Takes columns off the content of a block, one after the other."""

    def __init__(self, content: bytes, at: int) -> None:
        self._content, self._at = content, at

    def numbers(self, count: int, width: int) -> Ints:
        if not 0 <= width <= 8 or count < 0:
            raise ValueError("no width of a number")
        folded = np.zeros((count, 8), np.uint8)
        folded[:, :width] = self._planes(count, width)
        numbers = folded.view("<u8").reshape(-1).astype(np.uint64)
        return (numbers >> np.uint64(1)).view(np.int64) ^ -(numbers & np.uint64(1)).view(np.int64)

    def floats(self, count: int) -> NDArray[np.float64]:
        return np.ascontiguousarray(self._planes(count, 8)).view("<f8").reshape(-1).astype(np.float64)

    def _planes(self, count: int, width: int) -> NDArray[np.uint8]:
        size = count * width
        if self._at + size > len(self._content):
            raise ValueError("a column is cut short")
        planes = np.frombuffer(self._content, np.uint8, size, self._at).reshape(width, count)
        self._at += size
        return planes.T
