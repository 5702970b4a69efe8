"""A step of Horovod's synthetic benchmark with `hvd.DistributedOptimizer`, side by side with DDP and `bucketed`.

    python benchmarks/horovod.py --save

Contenders take turns step by step in one world of ranks, on 2 and 4 ranks of one host and on 2 emulated hosts with
one and with two ranks each. The ratio is to `bucketed`, round by round. Exit code 1 if `hvd` takes more than 1.03
times as long.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from support import Contender, ratio, slowest, take_turns, write_result
from torch.nn.functional import cross_entropy

import syncline.horovod.torch as hvd
from syncline.comm import instrumented
from syncline.horovod import world
from syncline.launcher.places import place_for
from syncline.plan import parse_plan
from syncline.spans import EventLog
from syncline.sync import make_sync
from syncline.units import format_seconds
from syncline.voice import Voice
from syncline.workload.models import build_model

LIMIT = 1.03
PLACES = {
    "2 ranks, one host": {"workers": 2},
    "4 ranks, one host": {"workers": 4},
    "2 hosts x 1 rank, 1 Gbit/s": {"workers": 2, "hosts": 2, "link": "1gbit"},
    "2 hosts x 2 ranks, 1 Gbit/s": {"workers": 4, "hosts": 2, "link": "1gbit"},
}


def measure(batch: int, rounds: int) -> dict[str, list[float]]:
    """On every rank."""
    hvd.init()
    here = world.current()
    torch.manual_seed(hvd.rank())
    images = torch.randn(batch, 3, 32, 32)
    labels = torch.randint(10, (batch,))
    contenders = {}
    for name in ("ddp", "bucketed", "hvd", "hvd, fp16"):
        model = build_model("vgg11", seed=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        module, finish = model, lambda: None
        if name.startswith("hvd"):
            compression = hvd.Compression.fp16 if "fp16" in name else hvd.Compression.none
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression)
        else:
            communicator = instrumented(here.again(), EventLog(keep=False), deadline_s=here.communicator.deadline_s)
            sync = make_sync(name, communicator)
            module, finish = sync.attach(model), sync.finish

        def step(module=module, finish=finish, optimizer=optimizer) -> None:  # type: ignore[no-untyped-def]
            optimizer.zero_grad()
            cross_entropy(module(images), labels).backward()
            finish()
            optimizer.step()

        contenders[name] = Contender(step)
    seconds = take_turns(contenders, rounds, meet=dist.barrier, warmup=3)
    by_rank: list[dict[str, list[float]]] = hvd.allgather_object(seconds)
    hvd.shutdown()
    return slowest(by_rank)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=16, help="images per rank")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--places", default="", help="part of the place's name; all without")
    parser.add_argument("--save", action="store_true", help="save the result next to this script")
    chosen = parser.parse_args()
    lines = [
        f"VGG-11, 37 MB of gradients, {chosen.batch} images per rank, {chosen.rounds} rounds.", "",
        "| place | contender | median | time / bucketed (quartiles) |", "|---|---|---|---|",
    ]  # fmt: skip
    missed = False
    for name, keys in PLACES.items():
        if chosen.places not in name:
            continue
        plan = parse_plan({"threads": 1, **keys})
        with TemporaryDirectory() as logs, place_for(plan).joined(plan, Voice("progress")) as ranks:
            times = ranks.run(measure, (chosen.batch, chosen.rounds), plan, Path(logs))
        for contender, seconds in times.items():
            middle, lower, upper = ratio(seconds, times["bucketed"])
            missed |= contender == "hvd" and middle > LIMIT
            lines.append(
                f"| {name} | {contender} | {format_seconds(statistics.median(seconds))} "
                f"| {middle:.3f} ({lower:.3f}-{upper:.3f}) |"
            )
    write_result("horovod", lines, save=chosen.save)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
