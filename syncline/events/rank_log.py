"""One session of one rank: a header and the blocks of records after it.

Reading looks at every block once. What is not a span (counters, losses, clocks) is kept as it is; of the spans, only
which steps they end and which blocks hold them. A step's own records are decoded again when it is asked for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from syncline.blocks import Group, Ints, Record, Words, decode, in_order
from syncline.events.clocks import SAME_CLOCK, Alignment
from syncline.events.steps import Pack, Phase, RankStep, Transfer
from syncline.methods import current_label
from syncline.spans import with_todays_name
from syncline.units import printable

TIMES = ("ready", "start", "end")
SPANS = ("step", "phase", "collective", "pack")
KEPT = 6
"""Blocks that stay decoded: a step's own and its neighbours', for some ranks."""


@dataclass(frozen=True)
class _Spans:
    """Steps of one method in order of their numbers: when each began and ended."""

    numbers: Ints
    starts: Ints
    ends: Ints

    @classmethod
    def of(cls, numbers: Ints, starts: Ints, ends: Ints) -> _Spans:
        """Of a number that is there twice, the last one counts."""
        order = np.argsort(numbers, kind="stable")
        ordered = numbers[order]
        last = order[np.append(ordered[1:] != ordered[:-1], [True])[: len(order)]]
        return cls(numbers[last], starts[last], ends[last])

    def places(self, numbers: Ints) -> tuple[Ints, NDArray[np.bool_]]:
        """Where each number stands, and whether it does."""
        at = np.minimum(np.searchsorted(self.numbers, numbers), len(self.numbers) - 1)
        return at, (self.numbers[at] == numbers) if len(self.numbers) else np.zeros(len(numbers), bool)

    def find(self, number: int) -> tuple[int, int] | None:
        at = int(np.searchsorted(self.numbers, number))
        if at == len(self.numbers) or self.numbers[at] != number:
            return None
        return int(self.starts[at]), int(self.ends[at])


NO_SPANS = _Spans(*(np.zeros(0, np.int64) for _ in range(3)))


@dataclass
class RankLog:
    """`bodies` are blocks as they are stored; logs of earlier versions are brought into this form."""

    rank: int
    header: Record
    session: int = 0
    alignment: Alignment = SAME_CLOCK
    bodies: list[bytes] = field(default_factory=list)
    others: list[Group] = field(default_factory=list)
    """What is no span."""
    taken: dict[str, tuple[Ints, Ints]] = field(default_factory=dict)
    """By method: numbers and durations of the steps that the rank finished and did something in."""
    ends_in: tuple[int, str] | None = None
    """The last step that has phases but no end, and its last phase: where a crash or a stop was."""
    _seen: list[tuple[int, str, Group]] = field(default_factory=list)
    """(block, method, steps and phases), until `settle`."""
    _ranges: dict[str, list[tuple[int, int, int]]] = field(default_factory=lambda: defaultdict(list))
    _where: dict[str, Ints] = field(default_factory=dict)
    """By method: block, lowest and highest step of each of its groups."""
    _spans: dict[str, _Spans] = field(default_factory=dict)

    def look(self, body: bytes, groups: Sequence[Group]) -> None:
        """Take a block in. Its spans are whole."""
        block = len(self.bodies)
        self.bodies.append(body)
        for group in groups:
            spans = of_kind(group, SPANS)
            if len(spans) < len(group):
                self.others.append(of_kind(group, SPANS, others=True))
            for method, rows in _by_method(spans):
                steps = _ints(rows, "step")
                self._ranges[method].append((block, int(steps.min()), int(steps.max())))
                noted = of_kind(rows, ("step", "phase"))
                if len(noted):
                    needed = {name: noted.columns[name] for name in ("kind", "step", "start", "end")}
                    names = {"name": noted.columns["name"]} if "name" in noted.columns else {}
                    self._seen.append((block, method, Group(noted.places, {**needed, **names})))

    def settle(self, alignment: Alignment, session: int) -> None:
        """All blocks are in, and it is known how this rank's clock goes."""
        self.alignment, self.session = alignment, session
        seen = [(block, method, self._aligned(group)) for block, method, group in self._seen]
        ended: dict[str, list[tuple[int, Group]]] = defaultdict(list)
        inside: dict[str, list[tuple[int, Group]]] = defaultdict(list)
        for block, method, group in seen:
            for kind, found in (("step", ended), ("phase", inside)):
                if len(rows := of_kind(group, (kind,))):
                    found[method].append((block, rows))
        self._seen = []
        self._where = {method: np.array(own, np.int64).T for method, own in self._ranges.items()}
        for method, groups in ended.items():
            columns = (
                np.concatenate([_ints(group, name) for _, group in groups]) for name in ("step", "start", "end")
            )
            self._spans[method] = _Spans.of(*columns)
        last = (-1, -1)
        for method, groups in inside.items():
            spans = self._spans.get(method, NO_SPANS)
            did = np.zeros(len(spans.numbers), bool)
            for block, group in groups:
                numbers = _ints(group, "step")
                at, known = spans.places(numbers)
                own = at[known]
                starts, ends = (_ints(group, name)[known] for name in ("start", "end"))
                did[own[(spans.starts[own] <= starts) & (ends <= spans.ends[own])]] = True
                cut = np.flatnonzero(~known & (numbers >= 0))
                if len(cut) and (place := (block, int(group.places[cut[-1]]))) > last:
                    last, row = place, group.rows(cut[-1:]).records()[0]
                    self.ends_in = (int(row["step"]), str(row["name"]))
            if did.any():
                self.taken[method] = (spans.numbers[did], (spans.ends - spans.starts)[did])

    def records(self, kind: str | None = None) -> Iterator[Record]:
        """In order, on the lowest rank's clock and with the session; all, or those of one kind."""
        if kind is not None and kind not in SPANS:
            yield from (self._placed(one) for group in self.others for one in of_kind(group, (kind,)).records())
            return
        for body in self.bodies:
            groups = [self._aligned(group) for group in decode(body) or ()]
            if kind is not None:
                groups = [of_kind(group, (kind,)) for group in groups]
            yield from map(self._placed, in_order(groups))

    def _placed(self, record: Record) -> Record:
        record["session"] = self.session
        return with_todays_name(record)

    def _aligned(self, group: Group) -> Group:
        if self.alignment.is_same:
            return group
        moved = {
            name: self.alignment.apply(column)
            for name, column in group.columns.items()
            if name in TIMES and not isinstance(column, Words) and column.dtype == np.int64
        }
        return replace(group, columns={**group.columns, **moved})

    def rank_step(self, method: str, number: int) -> RankStep:
        """A step that the rank finished, with transfers of the step before that were still on their way."""
        own, before = self._bare_step(method, number), self._bare_step(method, number - 1)
        assert own is not None, "only steps that are known are asked for"
        carried = tuple(transfer for transfer in before.transfers if transfer.end > own.start) if before else ()
        return replace(own, carried=carried) if carried else own

    def _bare_step(self, method: str, number: int) -> RankStep | None:
        """A record belongs to a step if it lies inside: the meeting before it or the loss line after it does not."""
        spans = self._spans.get(method, NO_SPANS)
        span, later = spans.find(number), spans.find(number + 1)
        if span is None:
            return None
        records = self._records_of(method, number)
        if later is not None:  # started only when the next step had begun
            found = self._records_of(method, number + 1)
            records += [one for one in found if one["kind"] == "collective" and one["ready"] < later[0]]
        inside = [record for record in records if _lies_inside(record, *span)]
        if not any(record["kind"] == "phase" for record in inside):
            return None
        return _rank_step(self.rank, *span, sorted(inside, key=lambda record: int(record["start"])))

    def _records_of(self, method: str, number: int) -> list[Record]:
        blocks, low, high = self._where[method]
        found = np.unique(blocks[(low <= number) & (number <= high)]).tolist()
        return [record for block in found for record in _by_step(_Block(self, block)).get((method, number), ())]


@dataclass(frozen=True)
class _Block:
    """A block as a key of the cache: a log is itself, and nothing else."""

    log: RankLog
    number: int

    def __hash__(self) -> int:
        return hash((id(self.log), self.number))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Block) and other.log is self.log and other.number == self.number


@lru_cache(maxsize=KEPT)
def _by_step(block: _Block) -> dict[tuple[str, int], list[Record]]:
    """The phases, transfers and packs of a block."""
    log, found = block.log, defaultdict(list)
    groups = [of_kind(group, SPANS[1:]) for group in decode(log.bodies[block.number]) or ()]
    for record in in_order([log._aligned(group) for group in groups]):
        found[current_label(with_todays_name(record).get("method", "")), int(record["step"])].append(record)
    return dict(found)


def of_kind(group: Group, kinds: Sequence[str], *, others: bool = False) -> Group:
    kind = group.columns["kind"]
    assert isinstance(kind, Words), "records have a kind, which is a word"
    codes = [code for code, value in enumerate(kind.values) if (value in kinds) != others]
    return group if len(codes) == len(kind.values) else group.rows(np.isin(kind.codes, codes))


def _by_method(group: Group) -> Iterator[tuple[str, Group]]:
    method = group.columns.get("method")
    if not isinstance(method, Words):
        yield from [("", group)] if len(group) else []
        return
    for code, name in enumerate(method.values):
        rows = group if len(method.values) == 1 else group.rows(method.codes == code)
        if len(rows):
            yield current_label(with_todays_name({"method": name})["method"]), rows


def _ints(group: Group, name: str) -> Ints:
    column = group.columns[name]
    assert not isinstance(column, Words), "damaged rows are gone"
    return column


def _lies_inside(record: Record, start: int, end: int) -> bool:
    """A transfer lies where what it sends was ready: with method ahead it may go on into the next step."""
    if record["kind"] == "collective":
        return start <= int(record["ready"]) <= end
    return start <= int(record["start"]) and int(record["end"]) <= end


def _rank_step(rank: int, start: int, end: int, records: Sequence[Record]) -> RankStep:
    phases, transfers, packs, stalls = [], [], [], []
    for record in records:
        if record["kind"] == "phase" and record["name"] == "stall":
            stalls.append(Phase(printable(str(record.get("label", ""))), record["start"], record["end"]))
        elif record["kind"] == "phase":
            phases.append(Phase(printable(record["name"]), record["start"], record["end"]))
        elif record["kind"] == "collective":
            ready = min(max(record["ready"], start), record["end"])
            about = (printable(record["name"]), printable(record["label"]), record["bytes"])
            transfers.append(Transfer(*about, ready, record["start"], record["end"]))
        else:
            packs.append(Pack(printable(record["label"]), record["start"], record["end"], record["busy"]))
    return RankStep(rank, start, end, tuple(phases), tuple(transfers), tuple(packs), stalls=tuple(stalls))
