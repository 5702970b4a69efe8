"""Slurm's short ways of writing: host lists such as "node[01-03,7],login" and task counts such as "4(x2),3"."""

from __future__ import annotations

import re

from syncline.errors import UsageError

_MOST_HOSTS = 100_000


def expand_hosts(text: str) -> list[str]:
    """'a[01-03,7]b,c' -> a01b, a02b, a03b, a7b, c. In Slurm's order, which is the order of its node numbers."""
    found: list[str] = []
    for name in _split(text):
        found += _expand(name)
        if len(found) > _MOST_HOSTS:
            raise UsageError(f"the host list {text!r} is too long to be true.")
    return found


def expand_tasks(text: str) -> list[int]:
    """'4(x2),3' -> 4, 4, 3."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise UsageError(f"the task counts {text!r} cannot be read.", action="They look like 4(x2),3.")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _split(text: str) -> list[str]:
    """At commas outside brackets."""
    return [name.strip() for name in re.findall(r"(?:[^,\[]|\[[^\]]*(?:\]|$))+", text) if name.strip()]


def _expand(name: str) -> list[str]:
    before, bracket, rest = name.partition("[")
    if not bracket:
        return [name]
    inside, closing, after = rest.partition("]")
    if not closing:
        raise UsageError(f"the host list {name!r} has a bracket that does not close.")
    return [before + number + end for number in _numbers(inside) for end in _expand(after)]


def _numbers(text: str) -> list[str]:
    found: list[str] = []
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdigit() or (dash and not high.isdigit()) or (dash and int(high) - int(low) > _MOST_HOSTS):
            raise UsageError(f"the host list's [{text}] cannot be read.", action="It looks like [01-03,7].")
        # Leading zeros belong to the name: node[08-10] is node08, node09, node10.
        found += [str(number).zfill(len(low)) for number in range(int(low), int(high or low) + 1)]
    return found
