"""What a long run's event logs cost: bytes on disk, time to write a step's records, and time and memory of `explain`.

    python benchmarks/event_log.py --steps 100000 --save

The records of each step are those of a training step of method bucketed with five buckets: seven phases, a transfer
and a pack for each bucket, counters, the loss and the step. Times are drawn from a seed: steps of about 10 ms with
noise, a late rank now and then. They are written by the same code as in a run, with a flush after each step. With
--pause, each flush is as old as if steps took that long, so that blocks are as small as in a slow run.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from support import write_result

from syncline import spans
from syncline.plan import parse_plan
from syncline.spans import EventLog
from syncline.store import create_run
from syncline.units import format_bytes, format_seconds

BUCKETS = 5
Fields = tuple[str, dict[str, Any]]


def step_records(rng: random.Random, start: int) -> tuple[list[Fields], int]:
    """One rank's records of a step, and its end. Times are nanoseconds."""

    def around(mean: float) -> int:
        return max(1000, round(rng.gauss(mean, mean / 20)))

    def phase(name: str, mean: float) -> None:
        nonlocal now
        begin, now = now + around(900), now + around(900) + around(mean)
        records.append(("phase", {"name": name, "start": begin, "end": now}))

    records: list[Fields] = []
    now = start
    for name, mean in (("data", 3e5), ("copy", 1e5), ("forward", 2.5e6), ("score", 5e4)):
        phase(name, mean)
    begin = now + around(900)
    ready = begin
    for bucket in range(BUCKETS):
        ready += around(1e6)
        label = f"bucket {bucket}"
        packed = ready + around(4e4)
        records.append(("pack", {"label": label, "start": ready, "end": packed, "busy": packed - ready}))
        sent, end = packed + around(2e4), packed + around(7e5) + (rng.random() < 0.05) * around(1e6)
        about = {"name": "all_reduce", "label": label, "bytes": 4_000_000 + bucket, "ready": packed}
        records.append(("collective", {**about, "start": sent, "end": end}))
    now = begin + around(5.2e6)
    records.append(("phase", {"name": "backward", "start": begin, "end": now}))
    records.append(("phase", {"name": "sync", "start": now + 800, "end": end + around(5e4)}))
    now = max(now, end) + around(6e4)
    phase("update", 8e5)
    sent = 20_000_000 + rng.randrange(3000)
    counted = {"sent": sent, "received": sent, "repeated": 0, "interface_sent": sent, "interface_received": sent}
    records.append(("counter", counted))
    now += around(3e4)
    records.append(("step", {"start": start, "end": now, "learning_rate": 0.1}))
    records.append(("loss", {"value": rng.random() + 1.0, "samples": 32}))
    return records, now + around(5e4)


def write_log(path: Path, rank: int, steps: int, pause_s: float) -> float:
    """Seconds of processor time that adding and writing took."""
    rng, now, spent = random.Random(rank), 10**12, 0.0
    log = EventLog(path, rank=rank, world_size=2, host=0, threads=1)
    log.method = "bucketed"
    for step in range(steps):
        records, now = step_records(rng, now)
        log.step = step
        if pause_s:
            log._flushed_ns -= round(pause_s * 1e9)
        before = time.process_time()
        for kind, fields in records:
            log.add(kind, **fields)
        log.flush()
        spent += time.process_time() - before
    before = time.process_time()
    log.close()
    return spent + time.process_time() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--pause", type=float, default=0.01, help="seconds that a step is taken to last")
    parser.add_argument("--save", action="store_true", help="save the result next to this script")
    parser.add_argument("--keep", type=Path, help="folder to keep the run in")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        plan = parse_plan({"method": "bucketed", "workers": 2, "model": "cnn", "steps": chosen.steps})
        run = create_run((chosen.keep or Path(folder)) / "run", kind="train", plan=plan, label="made")
        seconds = [write_log(run.events(rank), rank, chosen.steps, chosen.pause) for rank in range(2)]
        run.write_summary({})
        run.set_status("finished")
        sizes = [run.events(rank).stat().st_size for rank in range(2)]
        before = time.monotonic()
        done = subprocess.run(
            [Path(sys.executable).with_name("syncline"), "explain", run.path, "--json"],
            check=True,
            capture_output=True,
        )
        took = time.monotonic() - before
        memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        counted = json.loads(done.stdout)["methods"][0]["breakdown"]["steps"]
    lines = [
        f"{chosen.steps} steps of about {chosen.pause:g} s, 2 ranks, {BUCKETS} buckets; written every "
        f"{spans.FLUSH_EVERY_NS / 1e9:g} s.", "",
        "| what | value |", "|---|---|",
        f"| log of a rank | {format_bytes(max(sizes))}, {max(sizes) / chosen.steps:.0f} bytes a step |",
        f"| adding and writing | {format_seconds(max(seconds) / chosen.steps)} a step |",
        f"| `syncline explain` | {format_seconds(took)}, {format_bytes(memory)} at most; parts of {counted} steps |",
    ]  # fmt: skip
    print("\n".join(lines))
    write_result("event_log", lines, save=chosen.save)


if __name__ == "__main__":
    main()
