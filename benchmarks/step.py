"""One training step side by side: bare (no synchronisation), DDP, and our methods, taking turns in one world.

    python benchmarks/step.py --workers 2 --save

Bare is the same step without any method: what synchronisation costs is what lies above it. The ratio is to DDP, round
by round: below 1 is faster than DDP.
"""

from __future__ import annotations

import argparse
import statistics

import torch
import torch.distributed as dist
from support import Contender, join_world, ratio, slowest, take_turns, write_result
from torch import nn
from torch.nn.functional import cross_entropy

from syncline.comm import instrumented
from syncline.launcher.here import run_ranks
from syncline.spans import EventLog
from syncline.sync import make_sync
from syncline.units import format_seconds
from syncline.workload.models import build_model

METHODS = ("bare", "ddp", "bucketed", "shared-memory")


def parameter_heavy() -> nn.Module:
    """Many parameters, little compute: 25 M parameters, 100 MB of gradients."""
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 4096), nn.ReLU(), nn.Linear(4096, 3000), nn.Linear(3000, 10))


def measure(model_name: str, batch: int, methods: list[str], rounds: int) -> dict[str, list[float]]:
    backend = join_world()
    communicator = instrumented(backend, EventLog(keep=False), deadline_s=120)
    torch.manual_seed(backend.rank)
    images = torch.randn(batch, 3, 32, 32).to(memory_format=torch.channels_last)
    labels = torch.randint(10, (batch,))
    contenders = {}
    for method in methods:
        model = parameter_heavy() if model_name == "heavy" else build_model("vgg11", seed=1, channels_last=True)
        sync = None if method == "bare" else make_sync(method, communicator)
        module = model if sync is None else sync.attach(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

        def step(module=module, sync=sync, optimizer=optimizer) -> None:  # type: ignore[no-untyped-def]
            cross_entropy(module(images), labels).backward()
            if sync is not None:
                sync.finish()
            optimizer.step()
            optimizer.zero_grad()

        contenders[method] = Contender(step)
    seconds = take_turns(contenders, rounds, meet=dist.barrier, warmup=3)
    communicator.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", default="1,2,4")
    parser.add_argument("--batches", default="8,16,64", help="images per worker, separated by commas")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--no-heavy", action="store_true", help="leave out the parameter-heavy model")
    parser.add_argument("--save", action="store_true", help="save the result next to this script")
    chosen = parser.parse_args()
    lines = ["| model | images per worker | workers | method | median | time / ddp (quartiles) | time / bare |"]
    lines.append("|---|---|---|---|---|---|---|")
    cases = [("vgg11", int(batch)) for batch in chosen.batches.split(",")] + [("heavy", 8)] * (not chosen.no_heavy)
    for world_size in map(int, chosen.workers.split(",")):
        for model, batch in cases:
            args = (model, batch, chosen.methods.split(","), chosen.rounds)
            times = slowest(run_ranks(measure, args, workers=world_size, log_dir=None))
            for method, seconds in times.items():
                middle, lower, upper = ratio(seconds, times["ddp"])
                over_bare = ratio(seconds, times["bare"])[0] if "bare" in times else float("nan")
                lines.append(
                    f"| {model} | {batch} | {world_size} | {method} | {format_seconds(statistics.median(seconds))} "
                    f"| {middle:.3f} ({lower:.3f}-{upper:.3f}) | {over_bare:.3f} |"
                )
    write_result("step", lines, save=chosen.save)


if __name__ == "__main__":
    main()
