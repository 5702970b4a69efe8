"""Is the breakdown true? Steps whose parts are known: stated sleeps per layer, over a link of known rate.

    python benchmarks/ground_truth.py --save

Two emulated hosts (root or user namespaces are needed) train with `--compute sleep:`, so data, forward, backward and
update last what the file says, and gradients of known size cross a link of known rate. How long such a step waits for
the link is measured in plain torch, without any accounting of ours: a loop that sleeps as long, starts the same all-
reduces at the same moments and looks at the clock when the last gradient is there and when the last sum is. It runs
before and after each case, because an all-reduce in company (two of Gloo's threads share the link) or after a rest
(the link's rate limit saves up a burst) does not take as long as one by itself.

Beside it stands what frames with 66 bytes of headers for 1448 would need at the link's rate, if a bucket started when
it is ready on both ranks and the one before it has passed. Each part must lie within 5 % of the truth; parts that
should be nothing, below 5 % of the step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support import write_result

from syncline.measure.breakdown import break_down, summarise
from syncline.measure.events import read_events
from syncline.plan import Plan

LINK_MBIT = 200
FRAMES = 1514 / 1448
LAYERS = 5
PARAMETERS = 1_250_000
"""Of each layer: 5 MB of gradients, about 209 ms on the link."""
DATA_MS, FORWARD_MS, BACKWARD_MS, UPDATE_MS = 60.0, 40.0, 100.0, 80.0
DELAY_MS = 200.0
LATE = 1
"""The rank that is late where one is."""
WAITED = "waited.json"
WARMUP = 2
TOLERANCE = 0.05


@dataclass(frozen=True)
class Case:
    """A method, the gradients of which layers travel together, and how late rank 1 begins backward."""

    name: str
    method: str
    buckets: Sequence[int]
    """Layers in each bucket, in the order of backward."""
    options: dict[str, Any] = field(default_factory=dict)
    overlaps: bool = True
    delay_ms: float = 0.0


CASES = [
    Case("all-reduce, after backward", "all-reduce", [1] * LAYERS, overlaps=False),
    Case("ddp, a bucket a layer", "ddp", [1] * LAYERS, {"bucket_cap_mb": 4.0}),
    Case("bucketed, one bucket at the end", "bucketed", [LAYERS], {"overlap": False}, overlaps=False),
    Case("ddp, one bucket, rank 1 late", "ddp", [LAYERS], {"bucket_cap_mb": 1000.0}, delay_ms=DELAY_MS),
]


def ideal_ms(case: Case) -> float:
    """What the link would expose of the case's buckets, one after the other."""
    clock, layers = 0.0, 0
    for size in case.buckets:
        layers += size
        ready = (layers if case.overlaps else LAYERS) * BACKWARD_MS
        clock = max(clock, ready) + size * PARAMETERS * 4 * 8 * FRAMES / (LINK_MBIT * 1e3)
    return clock - LAYERS * BACKWARD_MS


def time_link(case: Case, steps: int) -> None:
    """On each rank: the sleeps and all-reduces of the case and nothing else; the late rank prints what it waited."""
    dist.init_process_group("gloo")
    rank, times = dist.get_rank(), []
    values = [torch.ones(layers * PARAMETERS) for layers in case.buckets]
    for _ in range(WARMUP + steps):
        time.sleep((DATA_MS + LAYERS * FORWARD_MS + UPDATE_MS) / 1e3)
        dist.barrier()
        time.sleep(case.delay_ms / 1e3 if rank == LATE else 0.0)
        ready, under_way = time.perf_counter(), []
        for value, layers in zip(values, case.buckets, strict=True):
            ready += layers * BACKWARD_MS / 1e3
            if case.overlaps:
                time.sleep(max(ready - time.perf_counter(), 0.0))
                under_way.append(dist.all_reduce(value, async_op=True))
        if not case.overlaps:
            time.sleep(max(ready - time.perf_counter(), 0.0))
        start = time.perf_counter()
        for work in under_way:
            work.wait()
        if not case.overlaps:
            for value in values:
                dist.all_reduce(value)
        times.append((time.perf_counter() - start) * 1e3)
    if rank == LATE:
        Path(WAITED).write_text(json.dumps(times[WARMUP:]))
    dist.destroy_process_group()


def on_hosts(command: Sequence[str], folder: Path) -> str:
    """What rank 0 of two emulated hosts prints."""
    syncline = [str(Path(sys.executable).with_name("syncline")), "cluster", "run", "--hosts", "2", "--threads", "1"]
    rate = ["--link", f"{LINK_MBIT}mbit", "--"]
    done = subprocess.run([*syncline, *rate, *command], capture_output=True, text=True, cwd=folder)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: {done.stdout}{done.stderr}")
    return done.stdout


def link_times(case: Case, steps: int, folder: Path) -> list[float]:
    """Milliseconds that each step of the plain loop waited for the link."""
    mine = [sys.executable, str(Path(__file__).resolve()), "--time-link", case.name, "--steps", str(steps)]
    on_hosts(mine, folder)
    times: list[float] = json.loads((folder / WAITED).read_text())
    return times


def truth(case: Case, wire_ms: float) -> dict[int, dict[str, float]]:
    """Milliseconds of each part on each rank."""
    common = {"data": DATA_MS, "forward": LAYERS * FORWARD_MS, "update": UPDATE_MS, "wire": wire_ms}
    backward = LAYERS * BACKWARD_MS
    return {
        0: {**common, "backward": backward, "wait": case.delay_ms},
        LATE: {**common, "backward": backward + case.delay_ms, "wait": 0.0},
    }


def measured(case: Case, steps: int, folder: Path) -> dict[int, dict[str, float]]:
    """Run the case on two emulated hosts and read its logs."""
    layer = f"forward_ms = {FORWARD_MS}\nbackward_ms = {BACKWARD_MS}\nshapes = [[{PARAMETERS}]]\n"
    layers = "\n".join(f'[[layers]]\nname = "layer{number}"\n{layer}' for number in range(LAYERS))
    (folder / "times.toml").write_text(f"data_ms = {DATA_MS}\nupdate_ms = {UPDATE_MS}\n\n{layers}")
    inject = {"rank": LATE, "phase": "backward", "delay_ms": case.delay_ms} if case.delay_ms else {}
    values = {"method": case.method, "options": case.options, "workers": 2, "steps": WARMUP + steps, "inject": inject}
    plan = Plan.model_validate({**values, "compute": f"sleep:{folder / 'times.toml'}", "deadline_s": 60.0})
    (folder / "plan.toml").write_text(plan.to_toml())
    worker = [sys.executable, "-m", "syncline.worker", str(folder / "plan.toml"), "--run-dir", str(folder / "run")]
    on_hosts(worker, folder)
    events = read_events(folder / "run")
    (method,) = events.steps
    counted = events.complete(method)[WARMUP:]
    means = summarise(counted, [break_down(step) for step in counted])
    assert means is not None, "there are steps"
    return {
        one.rank: {**{part: seconds * 1e3 for part, seconds in one.parts_s.items()}, "step": one.step_s * 1e3}
        for one in means.ranks
    }


def compared(case: Case, found: dict[int, dict[str, float]], wire_ms: float) -> tuple[list[str], bool]:
    """Lines of the table, and whether all is within the tolerance."""
    lines, passed = [], True
    for rank, expected in truth(case, wire_ms).items():
        for part, milliseconds in found[rank].items():
            known = expected.get(part, 0.0) if part != "step" else sum(expected.values())
            error = milliseconds / known - 1 if known else milliseconds / found[rank]["step"]
            passed &= abs(error) <= TOLERANCE
            if known or milliseconds >= 0.05:
                what = f"{error:+.1%}" if known else f"{error:.1%} of the step"
                lines.append(f"| {case.name} | {rank} | {part} | {known:.1f} | {milliseconds:.1f} | {what} |")
    return lines, passed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="steps of each case that are counted")
    parser.add_argument("--save", action="store_true", help="keep the result beside this file")
    parser.add_argument("--time-link", metavar="CASE", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.time_link:
        time_link(next(case for case in CASES if case.name == given.time_link), given.steps)
        return
    lines = ["| case | rank | part | truth, ms | found, ms | error |", "|---|---|---|---|---|---|"]
    plain = ["| case | waited for the link in plain torch, ms | ideal, ms |", "|---|---|---|"]
    verdicts = []
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            print(f"{case.name} …", file=sys.stderr, flush=True)
            before = link_times(case, given.steps, Path(folder))
            found = measured(case, given.steps, Path(folder))
            after = link_times(case, given.steps, Path(folder))
        wire_ms = statistics.mean([*before, *after])
        plain.append(
            f"| {case.name} | {statistics.mean(before):.1f}, {statistics.mean(after):.1f} | {ideal_ms(case):.1f} |"
        )
        rows, passed = compared(case, found, wire_ms)
        print("\n".join([plain[-1], *rows]), file=sys.stderr, flush=True)
        lines += rows
        verdicts.append(passed)
    rate = f"{LINK_MBIT} Mbit/s between two emulated hosts, {given.steps} steps, means"
    verdict = "every part within 5 %" if all(verdicts) else "NOT every part within 5 %"
    write_result("ground_truth", [f"{rate}: {verdict}.", "", *lines, "", *plain], save=given.save)
    sys.exit(0 if all(verdicts) else 1)


if __name__ == "__main__":
    main()
