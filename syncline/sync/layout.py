"""Where each gradient lies in a flat buffer, and how the buffer is cut into buckets. Pure: sizes in, ranges out.

There is one buffer per group (dtype and device). Gradients lie in it one after the other, in the order in which they
become ready, and a bucket is a range of it. A cut may go through a gradient: it stays one view, and is in several
buckets. Behind the gradients lies one flag per parameter, set where this rank has no gradient for it. They travel
with the group's last bucket, so ranks learn of unused parameters without a message of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

MB = 1_000_000

Group = tuple[torch.dtype, torch.device]


@dataclass(frozen=True)
class Size:
    """A gradient to be placed."""

    num_elements: int
    element_size: int
    group: Group


@dataclass(frozen=True)
class Slot:
    """Where a parameter's gradient and its flag lie."""

    group: Group
    start: int
    stop: int
    flag: int


@dataclass(frozen=True)
class Bucket:
    """A range of a group's buffer that travels as one."""

    group: Group
    start: int
    stop: int
    parameters: tuple[int, ...]
    """Numbers of the parameters that must be ready before it may start."""


@dataclass(frozen=True)
class Layout:
    slots: tuple[Slot, ...]
    """By parameter number."""
    buckets: tuple[Bucket, ...]
    """In the order in which they are sent."""
    lengths: dict[Group, int]
    """Elements of each group's buffer, flags included."""


def plan_layout(sizes: Sequence[Size], order: Sequence[int], *, cap_bytes: int, first_cap_bytes: int) -> Layout:
    """Place parameters in `order`, and cut at the caps.

    The first bucket of a group is small, so that sending starts early, and each one after it at most twice as large,
    so that the next is ready by the time the link is free. The last is small too, because it can only start when
    backward is over, and all of it is waited for.
    """
    slots: dict[int, Slot] = {}
    lengths: dict[Group, int] = {}
    buckets: list[Bucket] = []
    for group in dict.fromkeys(sizes[number].group for number in order):
        members = [number for number in order if sizes[number].group == group]
        total = sum(sizes[number].num_elements for number in members)
        end = 0
        for position, number in enumerate(members):
            start, end = end, end + sizes[number].num_elements
            slots[number] = Slot(group, start, end, total + position)
        lengths[group] = total + len(members)
        element_size = sizes[members[0]].element_size
        buckets += _cut(group, members, slots, total, first_cap_bytes // element_size, cap_bytes // element_size)
    place = {number: position for position, number in enumerate(order)}
    buckets.sort(key=lambda bucket: max(place[number] for number in bucket.parameters))
    return Layout(tuple(slots[number] for number in range(len(sizes))), tuple(buckets), lengths)


def _cut(
    group: Group, members: list[int], slots: dict[int, Slot], total: int, first_cap: int, cap: int
) -> list[Bucket]:
    first_cap = max(1, first_cap)
    edges, size = [0], min(first_cap, cap)
    while edges[-1] < total:
        edges.append(min(total, edges[-1] + max(1, size)))
        size = min(2 * size, cap)
    if len(edges) > 1 and total - first_cap > edges[-2]:
        edges.insert(-1, total - first_cap)
    buckets = []
    for start, stop in pairwise(edges):
        inside = [number for number in members if slots[number].start < stop and slots[number].stop > start]
        buckets.append(Bucket(group, start, stop, tuple(inside)))
    # The flags are known when every parameter of the group is ready or known to be unused.
    last_start = buckets.pop().start if buckets else 0
    return [*buckets, Bucket(group, last_start, total + len(members), tuple(members))]
