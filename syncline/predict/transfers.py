"""Transfers of one step on one link: in which order to send chunks, and how long the step then takes.

A step's compute is a line: backward from 0, in which chunk j is released at `ready_s`, then the next forward, which
first uses it at `due_s`, and which ends at `compute_s`. A chunk takes alpha + beta x bytes; the link carries one.
Forward stands still where a chunk is late, and everything after it moves along, so the step lasts

    compute  +  the largest lateness of any chunk,        lateness = end of its transfer - due

Sending the released chunk that is due first makes the largest lateness as small as it can be, up to the chunk that is
on the link when a more urgent one is released (W. A. Horn, Some simple scheduling algorithms, 1974).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

MOST_CHUNKS = 24
"""Of a step: each costs the ranks a decision."""


@dataclass(frozen=True)
class Chunk:
    """Seconds since backward began, in compute alone: no waiting for transfers."""

    num_bytes: int
    ready_s: float
    due_s: float


@dataclass(frozen=True)
class Link:
    """What an all-reduce of some bytes takes: alpha to start, beta for each byte."""

    alpha_s: float
    beta_s: float

    def seconds(self, num_bytes: int) -> float:
        return self.alpha_s + self.beta_s * num_bytes


@dataclass(frozen=True)
class Prediction:
    order: tuple[int, ...]
    """Numbers of the chunks, as they are sent."""
    step_s: float
    bound_s: float
    """No order can be quicker: the larger of compute and wire."""


def next_use_first(chunks: Sequence[Chunk], link: Link) -> tuple[int, ...]:
    """Of the chunks that are released, the one that is due first."""
    return _order(chunks, link, lambda number: (chunks[number].due_s, number))


def ready_first(chunks: Sequence[Chunk], link: Link) -> tuple[int, ...]:
    """As gradients become ready."""
    return _order(chunks, link, lambda number: (chunks[number].ready_s, number))


def predict_ahead(chunks: Sequence[Chunk], link: Link, compute_s: float, order: Sequence[int]) -> Prediction:
    """Chunks are sent in this order, and the next forward goes on while they travel."""
    ends = _ends(chunks, link, order)
    lateness = max((ends[number] - chunk.due_s for number, chunk in enumerate(chunks)), default=0.0)
    return Prediction(tuple(order), compute_s + max(0.0, lateness), _bound(chunks, link, compute_s))


def predict_barrier(chunks: Sequence[Chunk], link: Link, compute_s: float, backward_s: float) -> Prediction:
    """Chunks are sent as they become ready, and the next forward begins when all have arrived."""
    order = ready_first(chunks, link)
    late = max(_ends(chunks, link, order).values(), default=0.0) - backward_s
    return Prediction(order, compute_s + max(0.0, late), _bound(chunks, link, compute_s))


def chunk_bytes(link: Link, total_bytes: int) -> int:
    """The smallest size whose start-up is at most a tenth of its time, from 0.5 to 8 MB, in MOST_CHUNKS at most."""
    enough = 9 * link.alpha_s / link.beta_s if link.beta_s > 0 else 0.0
    return int(max(min(max(enough, 0.5e6), 8e6), total_bytes / MOST_CHUNKS))


def _bound(chunks: Sequence[Chunk], link: Link, compute_s: float) -> float:
    return max(compute_s, sum(link.seconds(chunk.num_bytes) for chunk in chunks))


def _order(chunks: Sequence[Chunk], link: Link, urgency: Callable[[int], object]) -> tuple[int, ...]:
    waiting, order, now_s = set(range(len(chunks))), [], 0.0
    while waiting:
        now_s = max(now_s, min(chunks[number].ready_s for number in waiting))
        released = [number for number in waiting if chunks[number].ready_s <= now_s]
        first = min(released, key=urgency)  # type: ignore[arg-type]
        waiting.remove(first)
        order.append(first)
        now_s += link.seconds(chunks[first].num_bytes)
    return tuple(order)


def _ends(chunks: Sequence[Chunk], link: Link, order: Sequence[int]) -> dict[int, float]:
    """A list is static: a chunk that is not ready yet holds up those behind it."""
    ends, now_s = {}, 0.0
    for number in order:
        now_s = max(now_s, chunks[number].ready_s) + link.seconds(chunks[number].num_bytes)
        ends[number] = now_s
    return ends
