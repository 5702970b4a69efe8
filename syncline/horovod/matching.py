"""Which requests of which ranks belong together: by name, in whatever order they come. Pure.

A request says what a rank wants to do: `kind`, `name`, `set` (of ranks), and for tensors `shapes`, `dtypes`, `op`,
`scale`, `root` and `splits`. Once every rank of the set has submitted a name, all get one answer, in one order that
the caller of `submit` keeps: go on, or an error that names both sides. A rank that has joined counts as one that
submits zeros. Requests and answers are dicts of plain values, because they travel as JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

Request = dict[str, Any]
Answer = dict[str, Any]

ALL_RANKS = 0
"""The number of the set that has all ranks."""
_ZEROS_DO = ("allreduce", "barrier")
"""What a rank that has joined can take part in."""


@dataclass
class Entry:
    """A name that some ranks have submitted."""

    since: float
    requests: dict[int, Request] = field(default_factory=dict)
    warned_at: float = 0.0


class Matching:
    """What rank 0 knows of all ranks' requests."""

    def __init__(self, size: int) -> None:
        self.sets: dict[int, list[int]] = {ALL_RANKS: list(range(size))}
        self.waiting: dict[tuple[int, str], Entry] = {}
        self.joined: list[int] = []
        """In the order in which they did."""
        self.left: dict[int, str] = {}
        """Ranks that are gone, and why."""
        self._next_set = 1

    def submit(self, rank: int, request: Request, now: float) -> list[Answer]:
        """A rank's request; the answers that it brings about, in order. Each says which ranks it is for."""
        if request["kind"] == "join":
            return self._join(rank)
        key = key_of(request)
        entry = self.waiting.setdefault(key, Entry(now))
        entry.requests[rank] = request
        return self._settle([key])

    def leave(self, rank: int, why: str) -> list[Answer]:
        """A rank is gone: whatever still waits for it fails."""
        self.left[rank] = why
        return self._settle(list(self.waiting))

    def missing(self, key: tuple[int, str]) -> list[int]:
        entry = self.waiting[key]
        return [rank for rank in self.sets[key[0]] if rank not in entry.requests and rank not in self.joined]

    def crossed(self, key: tuple[int, str]) -> tuple[int, str] | None:
        """Another operation under the same name that waits for the ranks which have submitted this one, and the other
        way round."""
        for other, entry in self.waiting.items():
            alike = other != key and other[0] == key[0] and _name_in(other) == _name_in(key)
            mine = self.waiting[key].requests.keys()
            if alike and set(self.missing(key)) <= entry.requests.keys() and set(self.missing(other)) <= mine:
                return other
        return None

    def fail(self, keys: Iterable[tuple[int, str]], why: str) -> list[Answer]:
        return [self._answer(key, why) for key in keys]

    def _join(self, rank: int) -> list[Answer]:
        self.joined.append(rank)
        answers = self._settle([key for key in self.waiting if key[0] == ALL_RANKS])
        if len(self.joined) == len(self.sets[ALL_RANKS]):
            last, self.joined = self.joined[-1], []
            answers.append({"say": "all joined", "ranks": self.sets[ALL_RANKS], "last": last})
        return answers

    def _settle(self, keys: Sequence[tuple[int, str]]) -> list[Answer]:
        answers = []
        for key in keys:
            missing = self.missing(key)
            gone = [rank for rank in missing if rank in self.left]
            if gone:
                answers.append(self._answer(key, self.left[gone[0]]))
            elif not missing:
                answers.append(self._answer(key, self._disagreement(key)))
        return answers

    def _answer(self, key: tuple[int, str], error: str | None) -> Answer:
        entry = self.waiting.pop(key)
        first = next(iter(entry.requests.values()))
        members = self.sets[key[0]]
        answer: Answer = {"say": "go", "key": list(key), "ranks": members, "error": error}
        if error is not None:
            answer["ranks"] = list(entry.requests)
        elif first["kind"] in ("allgather", "alltoall"):
            by_rank = [entry.requests[rank] for rank in members]
            what = "splits" if first["kind"] == "alltoall" else "shapes"
            answer["by_rank"] = [request[what] for request in by_rank]
        elif first["kind"] == "add set":
            answer["set"] = self._next_set
            self.sets[self._next_set] = first["members"]
            self._next_set += 1
        elif first["kind"] == "remove set":
            del self.sets[first["removed"]]
        if len(entry.requests) < len(members):
            answer["zeros"] = first  # what a rank that has joined supplies zeros for
        return answer

    def _disagreement(self, key: tuple[int, str]) -> str | None:
        requests = sorted(self.waiting[key].requests.items())
        rank, first = requests[0]
        kind = first["kind"]
        joined = [str(member) for member in self.joined if member in self.sets[key[0]]]
        if joined and kind not in _ZEROS_DO:
            return (
                f"{kind} {first['name']!r} is not supported with join: rank {', '.join(joined)} has joined already."
            )
        for other_rank, other in requests[1:]:
            for what in _COMPARED:
                if _compared(first, what) != _compared(other, what):
                    return (
                        f"Mismatched {what} of {kind} {first['name']!r}: rank {rank} submitted {describe(first)}, "
                        f"rank {other_rank} submitted {describe(other)}."
                    )
        return None


_COMPARED = ("dtypes", "shapes", "op", "scale", "root", "members", "removed")


def _compared(request: Request, what: str) -> Any:
    value = request.get(what)
    if what == "shapes" and request["kind"] in ("allgather", "alltoall"):
        return [(len(shape), shape[1:]) for shape in value or ()]  # the first dimension is each rank's own
    return value


def key_of(request: Request) -> tuple[int, str]:
    return request.get("set", ALL_RANKS), f"{request['kind']}.{request['name']}"


def _name_in(key: tuple[int, str]) -> str:
    return key[1].partition(".")[2]


def describe(request: Request) -> str:
    """A request in words: 'allreduce sum of float32 [3, 4]'."""
    tensors = [f"{dtype} {shape}" for dtype, shape in zip(request["dtypes"], request["shapes"], strict=True)]
    of = f" of {', '.join(tensors[:3])}{' and more' if len(tensors) > 3 else ''}" if tensors else ""
    op = f" {request['op']}" if request.get("op") else ""
    root = f" from rank {request['root']}" if request.get("root") is not None else ""
    scale = f" scaled by {request['scale']}" if request.get("scale", [1.0, 1.0]) != [1.0, 1.0] else ""
    ranks = f" of ranks {request['members']}" if request.get("members") else ""
    return f"{request['kind']}{op}{of}{root}{scale}{ranks}"
