"""What 16-bit compute gains on this processor: a step in bf16 beside one in float32, for three models.

    python benchmarks/precision.py --save

Both take turns step by step in one process with one thread: same weights, same samples, Syncline's own step. Batches
are those of the table; a ratio holds for its batch alone.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass

import torch
from support import Contender, ratio, take_turns, write_result

from syncline.comm.threads import ThreadCommunicator, ThreadWorld
from syncline.machine import bf16_instructions
from syncline.measure.load import LoadMeter
from syncline.plan import Plan, load_plan
from syncline.spans import EventLog
from syncline.sync import make_sync
from syncline.training.settings import step_settings
from syncline.training.step import Worker, train_step
from syncline.units import format_seconds
from syncline.workload.data.batches import Batches, ImageBatches
from syncline.workload.data.made import made_batches
from syncline.workload.data.synthetic import synthetic_images
from syncline.workload.recipes import make_model, make_optimizer
from syncline.workload.sharding import Sharding

BATCHES = {"vgg11": (16, 64), "resnet18": (16, 64), "bert-small": (4, 16)}
"""Samples per step: few, and enough to keep the units busy. A text has 128 tokens."""
BUSY = 0.05
"""Share of the cores' time that other processes may take before a result is marked."""


@dataclass(frozen=True)
class Row:
    model: str
    batch: int
    seconds: dict[str, list[float]]

    def cells(self) -> str:
        middle, lower, upper = ratio(self.seconds["bf16"], self.seconds["float32"])
        times = [format_seconds(statistics.median(self.seconds[name])) for name in ("float32", "bf16")]
        return (
            f"| {self.model} | {self.batch} | {times[0]} | {times[1]} | {middle:.2f} | {lower:.2f} to {upper:.2f} "
            f"| {1 / middle:.2f}x |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--models", default=",".join(BATCHES), help="names separated by commas")
    parser.add_argument("--save", action="store_true", help="save the result next to this script")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    alone, meter = ThreadCommunicator(ThreadWorld(1), 0), LoadMeter()
    rows = []
    for model in chosen.models.split(","):
        for batch in BATCHES[model]:
            rows.append(measured(model, batch, chosen.rounds, alone))
            print(rows[-1].cells(), flush=True)
    others = meter.others(alone) or 0.0
    instructions = ", ".join(bf16_instructions()) or "none"
    lines = [
        f"One step on one thread, float32 and bf16 taking turns, {chosen.rounds} rounds, 2 cut before them.",
        f"bf16 instructions: {instructions}.",
        "",
        "| model | samples | float32 | bf16 | bf16 / float32 | quartiles | speed-up |",
        "|---|---|---|---|---|---|---|",
        *(row.cells() for row in rows),
        "",
        f"Other processes took {others:.0%} of the cores' time."
        + (" **Measured under load: times mean little, ratios are rough.**" if others > BUSY else ""),
    ]
    part = "" if chosen.models == ",".join(BATCHES) else f"-{chosen.models.replace(',', '-')}"
    write_result(f"precision{part}", lines, save=chosen.save)


def measured(model: str, batch: int, rounds: int, alone: ThreadCommunicator) -> Row:
    plans = {name: _plan(model, batch, name) for name in ("float32", "bf16")}
    batches = _batches(plans["float32"])
    contenders = {name: _contender(plan, batches, alone) for name, plan in plans.items()}
    return Row(model, batch, take_turns(contenders, rounds, meet=lambda: None))


def _plan(model: str, batch: int, precision: str) -> Plan:
    given = {"model": model, "method": "single", "data": "synthetic", "global_batch": batch, "precision": precision}
    return load_plan(None, given)


def _batches(plan: Plan) -> Batches:
    if plan.model == "bert-small":
        return made_batches(plan)
    return ImageBatches(synthetic_images(), seed=plan.seed, channels_last=True)


def _contender(plan: Plan, batches: Batches, alone: ThreadCommunicator) -> Contender:
    model, sync = make_model(plan, torch.device("cpu"), batches.task), make_sync("single", alone)
    optimizer, log = make_optimizer(plan, model), EventLog(rank=0)
    worker = Worker(model, sync.attach(model), sync, optimizer, batches, log, **step_settings(plan))
    shards = Sharding(batches.num_train, plan.global_batch, plan.seed).epoch(0)

    def step() -> None:
        train_step(worker, next(shards))
        log.records.clear()

    return Contender(step)


if __name__ == "__main__":
    main()
