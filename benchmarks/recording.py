"""What the event log costs: the same training step with recording on and off, taking turns in one world.

    python benchmarks/recording.py --save

Three copies of a model take turns step by step: one with a log on disk as a run has it, two whose log is off (no hook
in DDP, no callback at the end of a bucket, no record). Writing the log out between steps is part of the recorded
turn. The second without a log is the control: what its ratio is off 1 is the machine's noise, not recording.

Steps are noisier than 1 %, so the records themselves are priced too: those of the run are added and written again,
with nothing else running.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from support import Contender, join_world, ratio, slowest, take_turns, write_result

from syncline.comm import instrumented
from syncline.launcher.here import run_ranks
from syncline.plan import load_plan
from syncline.spans import EventLog, read_log
from syncline.sync import make_sync
from syncline.training.step import Worker, train_step
from syncline.units import format_seconds
from syncline.workload.data.batches import ImageBatches
from syncline.workload.data.synthetic import synthetic_images
from syncline.workload.recipes import make_model, make_optimizer
from syncline.workload.sharding import Sharding

METHODS = ("all-reduce", "ddp", "bucketed", "ring", "shared-memory")


def measure(model: str, batch: int, method: str, rounds: int, folder: str) -> dict[str, list[float]]:
    backend = join_world()
    rank, world_size = backend.rank, backend.world_size
    plan = load_plan(None, {"model": model, "data": "synthetic", "global_batch": batch, "workers": world_size})
    batches = ImageBatches(synthetic_images(), seed=1, channels_last=True)
    contenders, logs, communicators = {}, [], []
    path = Path(folder) / f"{model}-{batch}-{method}-rank-{rank}.jsonl"
    recording = EventLog(path, rank=rank, world_size=world_size)
    for name, log in (("off", EventLog(keep=False)), ("on", recording), ("off too", EventLog(keep=False))):
        communicator = instrumented(backend, log, deadline_s=120)
        network = make_model(plan, torch.device("cpu"), batches.task)
        sync = make_sync(method, communicator, log=None if log.off else log)
        optimizer = make_optimizer(plan, network)
        worker = Worker(network, sync.attach(network), sync, optimizer, batches, log)
        contenders[name] = Contender(_stepper(worker, Sharding(10_000, batch, 1, rank, world_size)))
        logs.append(log)
        communicators.append(communicator)
    seconds = take_turns(contenders, rounds, meet=dist.barrier, warmup=3)
    for log in logs:
        log.close()
    communicators[0].close()
    return {**seconds, "records": [_price(path) / (rounds + 3)] * rounds}


def _price(path: Path) -> float:
    """Processor seconds to add and write all records of a log once more."""
    records = [(record.pop("kind"), record) for record in read_log(path)[1:]]
    for _, fields in records:
        for key in ("seq", "step", "method"):
            fields.pop(key, None)
    log = EventLog(path.with_suffix(".again"))
    start = time.process_time()  # of this process alone, whoever else is at work
    for kind, fields in records:
        log.add(kind, **fields)
    log.flush(force=True)
    seconds = time.process_time() - start
    log.close()
    return seconds


def _stepper(worker: Worker, sharding: Sharding):  # type: ignore[no-untyped-def]
    """One step as the training loop takes it: numbered, noted, flushed about once a second."""
    shards = iter(shard for epoch in range(1000) for shard in sharding.epoch(epoch))

    def step() -> None:
        worker.log.step += 1
        start_ns = time.monotonic_ns()
        result = train_step(worker, next(shards))
        worker.log.add("step", start=start_ns, end=time.monotonic_ns())
        worker.log.add("loss", value=result.loss, samples=result.num_samples)
        worker.log.flush()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--models", default="vgg11,cnn", help="models, separated by commas")
    parser.add_argument("--batch", type=int, default=64, help="images over all workers")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--save", action="store_true", help="save the result next to this script")
    chosen = parser.parse_args()
    lines = [f"{chosen.workers} workers, global batch {chosen.batch}, {chosen.rounds} rounds, taking turns.", ""]
    lines += ["| model | method | step, recording off | on | on / off (quartiles) | off / off | records alone |"]
    lines += ["|---|---|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as folder:
        for model in chosen.models.split(","):
            for method in chosen.methods.split(","):
                args = (model, chosen.batch, method, chosen.rounds, folder)
                times = slowest(run_ranks(measure, args, workers=chosen.workers, log_dir=None))
                ratios = [ratio(times[name], times["off"]) for name in ("on", "off too")]
                medians = [format_seconds(statistics.median(times[name])) for name in ("off", "on")]
                price = times["records"][0]
                share = f"{format_seconds(price)}, {price / statistics.median(times['off']):.2%}"
                cells = [model, method, *medians, *(f"{a:.3f} ({b:.3f}-{c:.3f})" for a, b, c in ratios), share]
                lines.append(f"| {' | '.join(cells)} |")
                print(lines[-1], flush=True)
    write_result("recording", lines, save=chosen.save)


if __name__ == "__main__":
    main()
