"""What the benchmarks share: interleaved timing on ranks, and result files with machine and versions."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path

from syncline.comm.torch_backend import TorchCommunicator, connect
from syncline.launcher.adopt import placement_from_environment
from syncline.store import machine


@dataclass(frozen=True)
class Contender:
    """`prepare` and `check` are not timed."""

    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None
    check: Callable[[], object] = lambda: None


def join_world() -> TorchCommunicator:
    """On a rank: join the Gloo group that the launcher's environment describes."""
    place = placement_from_environment()
    assert place is not None, "run_ranks sets the environment"
    return connect(place, backend="gloo", deadline=timedelta(seconds=120))


def take_turns(
    contenders: Mapping[str, Contender], rounds: int, *, meet: Callable[[], object], warmup: int = 2
) -> dict[str, list[float]]:
    """Seconds of each contender, round by round: A B C A B C …, all ranks starting each turn together."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(warmup + rounds):
        for name, contender in contenders.items():
            contender.prepare()
            meet()
            start = time.perf_counter()
            contender.run()
            if number >= warmup:
                seconds[name].append(time.perf_counter() - start)
            contender.check()
    return seconds


def slowest(by_rank: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """A synchronous operation lasts as long as its slowest rank needs."""
    return {name: [max(turn) for turn in zip(*(rank[name] for rank in by_rank), strict=True)] for name in by_rank[0]}


def ratio(above: list[float], below: list[float]) -> tuple[float, float, float]:
    """Median and quartiles of the round-by-round ratio."""
    ratios = sorted(top / bottom for top, bottom in zip(above, below, strict=True))
    lower, _, upper = statistics.quantiles(ratios, n=4, method="inclusive")
    return statistics.median(ratios), lower, upper


def write_result(what: str, lines: list[str], *, save: bool) -> None:
    """Print the lines; with `save`, write them to a file next to this one with machine, versions and command."""
    print("\n".join(lines))
    if not save:
        return
    info = machine()
    name = "".join(letter if letter.isalnum() else "-" for letter in str(info["processor"]).lower()).strip("-")
    path = Path(__file__).parent / f"{what}_{name}_{date.today():%Y%m%d}.md"
    head = [f"# {what}", "", f"Command: `python {' '.join(sys.argv)}`", ""]
    head += [f"- {key}: {value}" for key, value in info.items()]
    path.write_text("\n".join([*head, "", *lines, ""]))
    print(f"saved in {path}")
