"""Is the breakdown true? Steps whose parts are known: stated sleeps per layer, over a link of known rate.

    python benchmarks/ground_truth.py --save

Two emulated hosts (root or user namespaces are needed) train with `--compute sleep:`, so data, forward, backward and
update last what the file says, and gradients of known size cross a link of known rate. When they crossed it is seen
from outside: on each host a process of its own reads the kernel's count of the link's bytes every 2 ms. A step waits
for the link from the moment at which its last gradient is there, which the sleeps tell, until the last byte has
arrived. A reference from another run would not do: a token bucket does not give back what a pause of the machine
cost, and where a hypervisor takes cores away the same transfer lasts up to three times as long.

The result also shows what frames of 1448 bytes plus 66 of headers need at the link's rate, if a bucket started when
it is ready on both ranks and the one before it has passed. Each part must lie within 5 % of the truth; parts that
should be nothing, below 5 % of the step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support import write_result

from syncline.accounting.breakdown import break_down, summarise
from syncline.events import read_events
from syncline.launcher.emulation.network import INTERFACE
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
WARMUP = 2
LOOK_S = 0.002
TRAFFIC_BYTES = 4000
"""From one look to the next: a link at full rate carries twelve times as much, and heartbeats are smaller."""
REST_S = 0.15
"""Without traffic, between one step's gradients and the next's."""
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


def watch_link(command: Sequence[str], samples: Path) -> None:
    """Run the command; meanwhile write down when this host's link carried something, in each direction."""
    carried: dict[str, list[tuple[float, int]]] = {"received": [], "sent": []}
    last = link_bytes()
    process = subprocess.Popen(command)
    while process.poll() is None:
        time.sleep(LOOK_S)
        now, counts = time.perf_counter(), link_bytes()
        for direction, times in carried.items():
            if counts[direction] > last[direction]:
                times.append((now, counts[direction] - last[direction]))
        last = counts
    samples.write_text(json.dumps(carried))
    sys.exit(process.returncode)


def link_bytes() -> dict[str, int]:
    (line,) = (line for line in Path("/proc/net/dev").read_text().splitlines() if f"{INTERFACE}:" in line)
    fields = line.partition(":")[2].split()
    return {"received": int(fields[0]), "sent": int(fields[8])}


def waited_for_link(case: Case, steps: int, folder: Path) -> list[float]:
    """Milliseconds of each step from its last gradient to the last byte."""
    hosts = [json.loads((folder / f"link-{rank}.json").read_text()) for rank in range(2)]
    # All begins when the late host sends: before that only one side could.
    begun = [times[0] for times in spells(hosts[LATE]["sent"])][-steps:]
    arrived = [time for host in hosts for time in traffic(host["received"])]
    ahead_s = (LAYERS - case.buckets[0]) * BACKWARD_MS / 1e3 if case.overlaps else 0.0
    following = [*begun[1:], float("inf")]
    ends = [max(time for time in arrived if time < after - REST_S / 2) for after in following]
    return [(end - start - ahead_s) * 1e3 for start, end in zip(begun, ends, strict=True)]


def traffic(carried: list[tuple[float, int]]) -> list[float]:
    """Moments at which gradients passed, not just heartbeats."""
    return [time for time, count in carried if count >= TRAFFIC_BYTES]


def spells(carried: list[tuple[float, int]]) -> list[list[float]]:
    moments: list[list[float]] = []
    for moment in traffic(carried):
        if not moments or moment - moments[-1][-1] > REST_S:
            moments.append([])
        moments[-1].append(moment)
    return moments


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
    watched = [sys.executable, str(Path(__file__).resolve()), "--watch-link", str(folder)]
    syncline = [str(Path(sys.executable).with_name("syncline")), "cluster", "run", "--hosts", "2", "--threads", "1"]
    done = subprocess.run([*syncline, "--link", f"{LINK_MBIT}mbit", "--", *watched], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{case.name}: {done.stdout}{done.stderr}")
    events = read_events(folder / "run")
    (method,) = events.steps
    counted = events.complete(method)[WARMUP:]
    steps_ms: dict[int, list[dict[str, float]]] = {}
    for step in counted:
        single = summarise([step], [break_down(step)])
        assert single is not None, "there is a step"
        for row in single.ranks:
            parts = {part: seconds * 1e3 for part, seconds in row.parts_s.items()}
            steps_ms.setdefault(row.rank, []).append({**parts, "step": row.step_s * 1e3})
    # Medians, here and of the link: one step that the machine disturbed would weigh too much in a mean of few.
    return {
        rank: {part: statistics.median(parts[part] for parts in rows) for part in rows[0]}
        for rank, rows in steps_ms.items()
    }


def compared(case: Case, parts_ms: dict[int, dict[str, float]], wire_ms: float) -> tuple[list[str], bool]:
    """Lines of the table, and whether all is within the tolerance."""
    lines, passed = [], True
    for rank, expected in truth(case, wire_ms).items():
        for part, milliseconds in parts_ms[rank].items():
            known = expected.get(part, 0.0) if part != "step" else sum(expected.values())
            error = milliseconds / known - 1 if known else milliseconds / parts_ms[rank]["step"]
            passed &= abs(error) <= TOLERANCE
            if known or milliseconds >= 0.05:
                what = f"{error:+.1%}" if known else f"{error:.1%} of the step"
                lines.append(f"| {case.name} | {rank} | {part} | {known:.1f} | {milliseconds:.1f} | {what} |")
    return lines, passed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="counted steps of each case")
    parser.add_argument("--save", action="store_true", help="save the result next to this script")
    parser.add_argument("--watch-link", metavar="FOLDER", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.watch_link:
        folder = given.watch_link
        worker = [
            sys.executable,
            "-m",
            "syncline.worker",
            str(folder / "plan.toml"),
            "--run-dir",
            str(folder / "run"),
        ]
        watch_link(worker, folder / f"link-{os.environ['RANK']}.json")
    lines = ["| case | rank | part | truth, ms | measured, ms | error |", "|---|---|---|---|---|---|"]
    plain = ["| case | waited for the link by its own count, ms (median, quartiles) | ideal, ms |", "|---|---|---|"]
    verdicts = []
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            print(f"{case.name} …", file=sys.stderr, flush=True)
            parts_ms = measured(case, given.steps, Path(folder))
            waited = waited_for_link(case, given.steps, Path(folder))
        lower, wire_ms, upper = statistics.quantiles(waited, n=4, method="inclusive")
        plain.append(f"| {case.name} | {wire_ms:.1f}, {lower:.1f} to {upper:.1f} | {ideal_ms(case):.1f} |")
        rows, passed = compared(case, parts_ms, wire_ms)
        print("\n".join([plain[-1], *rows]), file=sys.stderr, flush=True)
        lines += rows
        verdicts.append(passed)
    rate = f"{LINK_MBIT} Mbit/s between two emulated hosts, {given.steps} steps, medians"
    verdict = "every part within 5 %" if all(verdicts) else "NOT every part within 5 %"
    write_result("ground_truth", [f"{rate}: {verdict}.", "", *lines, "", *plain], save=given.save)
    sys.exit(0 if all(verdicts) else 1)


if __name__ == "__main__":
    main()
