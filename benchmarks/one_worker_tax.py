"""What Syncline's step costs on one worker, beside a bare PyTorch loop of the same model with data in memory.

    python benchmarks/one_worker_tax.py --save

Both take turns step by step in one process. The bare loop indexes a tensor of normalised images. Ours crops, flips
and normalises each batch as a run does, weighs the loss, notes phases in an event log on disk, and calls the method.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import torch
from support import Contender, ratio, take_turns, write_result
from torch.nn.functional import cross_entropy

from syncline.comm.threads import ThreadCommunicator, ThreadWorld
from syncline.machine import cores
from syncline.plan import load_plan
from syncline.spans import EventLog
from syncline.sync import make_sync
from syncline.training.step import Worker, train_step
from syncline.units import format_seconds
from syncline.workload.data.batches import ImageBatches
from syncline.workload.data.synthetic import synthetic_images
from syncline.workload.recipes import make_model, make_optimizer
from syncline.workload.sharding import Sharding


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--save", action="store_true", help="save the result next to this script")
    chosen = parser.parse_args()
    torch.set_num_threads(cores())
    plan = load_plan(None, {"method": "single", "data": "synthetic", "global_batch": chosen.batch})
    images, cpu = synthetic_images(), torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder:
        log = EventLog(Path(folder) / "rank-0.jsonl")
        contenders = {"bare": bare(plan, images, cpu), "syncline": ours(plan, images, cpu, log)}
        times = take_turns(contenders, chosen.rounds, meet=lambda: None, warmup=3)
        log.close()
    middle, lower, upper = ratio(times["syncline"], times["bare"])
    lines = [
        f"VGG-11, batch {chosen.batch}, {cores()} threads, {chosen.rounds} rounds, taking turns.",
        "",
        *(f"- {name}: median {format_seconds(statistics.median(seconds))}" for name, seconds in times.items()),
        f"- syncline / bare: {middle:.3f} (quartiles {lower:.3f} to {upper:.3f})",
    ]
    write_result("one_worker_tax", lines, save=chosen.save)


def bare(plan, images, device) -> Contender:  # type: ignore[no-untyped-def]
    model = make_model(plan, device)
    optimizer = make_optimizer(plan, model)
    pixels = torch.from_numpy(images.train_images[:2048]).float().div_(255).sub_(0.47).div_(0.25)
    pixels = pixels.to(memory_format=torch.channels_last)
    labels = torch.from_numpy(images.train_labels[:2048])
    generator = torch.Generator().manual_seed(0)

    def step() -> None:
        chosen = torch.randint(2048, (plan.global_batch,), generator=generator)
        optimizer.zero_grad()
        loss = cross_entropy(model(pixels[chosen]), labels[chosen])
        loss.backward()
        optimizer.step()
        loss.item()

    return Contender(step)


def ours(plan, images, device, log: EventLog) -> Contender:  # type: ignore[no-untyped-def]
    model = make_model(plan, device)
    sync = make_sync("single", ThreadCommunicator(ThreadWorld(1), 0))
    batches = ImageBatches(images, seed=plan.seed, channels_last=True)
    worker = Worker(model, sync.attach(model), sync, make_optimizer(plan, model), batches, log)
    shards = Sharding(len(images.train_labels), plan.global_batch, plan.seed).epoch(0)

    def step() -> None:
        train_step(worker, next(shards))
        log.flush()

    return Contender(step)


if __name__ == "__main__":
    main()
