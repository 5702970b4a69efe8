"""Is the breakdown true? Steps whose parts are known: stated sleeps per layer, over a link of known rate.

    python benchmarks/ground_truth.py --save

Two emulated hosts (root or user namespaces are needed) train with `--compute sleep:`, so data, forward, backward and
update last what the file says, and gradients of known size cross a link of known rate. How long an all-reduce of that
size takes there is measured beforehand by itself, in plain torch, without any accounting of ours; beside it stands
what frames with 66 bytes of headers for 1448 would need at the link's rate.

What is exposed of it follows from when each bucket is ready: a bucket starts when it is ready on both ranks and the
one before it has passed. Each part must lie within 5 % of the truth; parts that should be nothing, below 5 % of the
step.
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


def ideal_ms(layers: int) -> float:
    return layers * PARAMETERS * 4 * 8 * FRAMES / (LINK_MBIT * 1e3)


def time_link() -> None:
    """On each rank: all-reduces of one layer and of all layers, nothing else going on; rank 0 prints medians."""
    dist.init_process_group("gloo")
    found = {}
    for layers in (1, LAYERS):
        values, times = torch.ones(layers * PARAMETERS), []
        for _ in range(7):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(values)
            times.append((time.perf_counter() - start) * 1e3)
        found[layers] = statistics.median(times[2:])
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


def on_hosts(command: Sequence[str], folder: Path) -> str:
    """What rank 0 of two emulated hosts prints."""
    syncline = [str(Path(sys.executable).with_name("syncline")), "cluster", "run", "--hosts", "2", "--threads", "1"]
    rate = ["--link", f"{LINK_MBIT}mbit", "--"]
    done = subprocess.run([*syncline, *rate, *command], capture_output=True, text=True, cwd=folder)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: {done.stdout}{done.stderr}")
    return done.stdout


def link_times() -> dict[int, float]:
    """Milliseconds of an all-reduce by itself, by layers."""
    printed = on_hosts([sys.executable, str(Path(__file__).resolve()), "--time-link"], Path.cwd())
    found = json.loads(next(line for line in printed.splitlines() if line.startswith("{")))
    return {int(layers): float(milliseconds) for layers, milliseconds in found.items()}


def truth(case: Case, wire_ms: dict[int, float]) -> dict[int, dict[str, float]]:
    """Milliseconds of each part on each rank."""
    last = LAYERS * BACKWARD_MS
    ready, clock, layers = [], 0.0, 0
    for size in case.buckets:
        layers += size
        ready.append(layers * BACKWARD_MS if case.overlaps else last)
    for moment, size in zip(ready, case.buckets, strict=True):
        clock = max(clock, moment + case.delay_ms) + wire_ms[size]
    exposed = clock - (last + case.delay_ms)
    common = {"data": DATA_MS, "forward": LAYERS * FORWARD_MS, "update": UPDATE_MS, "wire": exposed}
    return {
        0: {**common, "backward": last, "wait": case.delay_ms},
        1: {**common, "backward": last + case.delay_ms, "wait": 0.0},
    }


def measured(case: Case, steps: int, folder: Path) -> dict[int, dict[str, float]]:
    """Run the case on two emulated hosts and read its logs."""
    layer = f"forward_ms = {FORWARD_MS}\nbackward_ms = {BACKWARD_MS}\nshapes = [[{PARAMETERS}]]\n"
    layers = "\n".join(f'[[layers]]\nname = "layer{number}"\n{layer}' for number in range(LAYERS))
    (folder / "times.toml").write_text(f"data_ms = {DATA_MS}\nupdate_ms = {UPDATE_MS}\n\n{layers}")
    inject = {"rank": 1, "phase": "backward", "delay_ms": case.delay_ms} if case.delay_ms else {}
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


def compared(case: Case, found: dict[int, dict[str, float]], wire_ms: dict[int, float]) -> tuple[list[str], bool]:
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
    parser.add_argument("--time-link", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.time_link:
        time_link()
        return
    wire_ms = link_times()
    alone = [
        f"{layers * PARAMETERS * 4 / 1e6:.0f} MB {one:.0f} ms ({ideal_ms(layers):.0f} ideal)"
        for layers, one in wire_ms.items()
    ]
    lines = ["| case | rank | part | truth, ms | found, ms | error |", "|---|---|---|---|---|---|"]
    verdicts = []
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            print(f"{case.name} …", file=sys.stderr, flush=True)
            rows, passed = compared(case, measured(case, given.steps, Path(folder)), wire_ms)
            print("\n".join(rows), file=sys.stderr, flush=True)
        lines += rows
        verdicts.append(passed)
    rate = f"{LINK_MBIT} Mbit/s between two emulated hosts, {given.steps} steps, means"
    verdict = "every part within 5 %" if all(verdicts) else "NOT every part within 5 %"
    head = [f"{rate}: {verdict}.", f"All-reduce by itself: {', '.join(alone)}.", ""]
    write_result("ground_truth", [*head, *lines], save=given.save)
    sys.exit(0 if all(verdicts) else 1)


if __name__ == "__main__":
    main()
