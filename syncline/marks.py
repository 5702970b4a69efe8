"""Marks: what a reader must know beside a result, because as many real machines would give another one.

One rule gives them to every run, whoever started its ranks. A mark is printed and stored as its sentence, which
begins with its kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from syncline.plan import Plan

Kind = Literal["stretched", "replayed", "link"]


@dataclass(frozen=True)
class Mark:
    kind: Kind
    """stretched: ranks share cores; replayed: compute is slept; link: an emulated link is slower than its rate."""
    text: str
    """What is printed, kind included."""

    @classmethod
    def parse(cls, text: str) -> Mark:
        """From its sentence, as summaries hold it."""
        return cls(cast(Kind, text.partition(":")[0]), text)

    def __str__(self) -> str:
        return self.text


STRETCHED = Mark("stretched", "stretched: compute shares cores")
REPLAYED = Mark("replayed", "replayed: compute is slept")
ON_LINKS = Mark("replayed", f"{REPLAYED}, only the network is real")
ON_LOOPBACK = Mark("replayed", f"{REPLAYED}, only the exchange over this machine's loopback is real")


def marks_of(
    plan: Plan, cores: int, link_check: Mapping[str, Any] | None = None, *, machines: int | None = None
) -> list[Mark]:
    """The marks of a run of this plan on machines of so many cores each.

    `link_check` is what emulated links carried (LinkCheck.as_dict); emulated hosts share one machine. `machines`: how
    many there are, where another launcher than Syncline placed the ranks.
    """
    if plan.replayed:
        marks = [REPLAYED if plan.workers == 1 else ON_LINKS if plan.hosts > 1 else ON_LOOPBACK]
    else:
        emulated = plan.link is not None or link_check is not None
        machines = machines or (1 if emulated else plan.hosts)
        marks = [STRETCHED] if plan.workers * (plan.threads or 1) > cores * machines else []
    if link_check and link_check["note"]:
        marks.append(Mark("link", link_check["note"]))
    return marks
