"""What counting the bytes of each step costs, as a share of a VGG-11 step, on ranks with real sockets.

    python benchmarks/counters.py --workers 2 --save

Both readings of a step (before and after) are timed together, taking turns with steps of method bucketed.
"""

from __future__ import annotations

import argparse
import statistics

import torch
import torch.distributed as dist
from support import Contender, join_world, slowest, take_turns, write_result
from torch.nn.functional import cross_entropy

from syncline.comm import instrumented
from syncline.comm.counters import StepTraffic
from syncline.launcher.here import run_ranks
from syncline.spans import EventLog
from syncline.sync import make_sync
from syncline.units import format_seconds
from syncline.workload.models import build_model


def measure(batch: int, rounds: int) -> dict[str, list[float]]:
    backend = join_world()
    communicator = instrumented(backend, EventLog(keep=False), deadline_s=120)
    images = torch.randn(batch, 3, 32, 32).to(memory_format=torch.channels_last)
    labels = torch.randint(10, (batch,))
    model = build_model("vgg11", seed=1, channels_last=True)
    sync = make_sync("bucketed", communicator)
    module, traffic = sync.attach(model), StepTraffic(EventLog())

    def step() -> None:
        cross_entropy(module(images), labels).backward()
        sync.finish()
        model.zero_grad()

    def count() -> None:
        traffic.begin()
        traffic.end()

    contenders = {"step": Contender(step), "count": Contender(count)}
    seconds = take_turns(contenders, rounds, meet=dist.barrier, warmup=3)
    communicator.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", default="2")
    parser.add_argument("--batches", default="8,64", help="images per worker, separated by commas")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--save", action="store_true", help="save the result next to this script")
    chosen = parser.parse_args()
    lines = ["| images per worker | workers | step without update, median | both readings, median | share |"]
    lines.append("|---|---|---|---|---|")
    for world_size in map(int, chosen.workers.split(",")):
        for batch in map(int, chosen.batches.split(",")):
            args = (batch, chosen.rounds)
            times = slowest(run_ranks(measure, args, workers=world_size, log_dir=None))
            step, count = (statistics.median(times[name]) for name in ("step", "count"))
            lines.append(
                f"| {batch} | {world_size} | {format_seconds(step)} | {format_seconds(count)} | {count / step:.3%} |"
            )
    write_result("counters", lines, save=chosen.save)


if __name__ == "__main__":
    main()
