"""Composition root: what one rank does, from a plan to its result.

The same plan runs under Syncline's own launcher (`syncline train`) and under anybody else's:

    torchrun --nproc-per-node 4 -m syncline.worker plan.toml
    mpiexec -n 4 python -m syncline.worker plan.toml         # method = "mpi", or any other on one host
    srun -N 4 -n 8 python -m syncline.worker plan.toml
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from syncline.accounting.statistics import counted, timing
from syncline.comm import Communicator
from syncline.comm.mpi_backend import aborting
from syncline.comm.threads import ThreadCommunicator, ThreadWorld
from syncline.errors import DataError, PlanError, RunFolderError, SynclineError
from syncline.launcher import stacks, watch
from syncline.machine import cores
from syncline.measure.certify import Certifier
from syncline.measure.comparison import Comparison, contenders
from syncline.measure.load import LoadMeter
from syncline.measure.probing import run_probe
from syncline.methods import BASELINE, METHODS, PLANNED_AFTER
from syncline.plan import Plan, load_plan
from syncline.rank import Rank, backend_of, joined, place_of
from syncline.reaching import reached
from syncline.remote import is_url
from syncline.report.terminal import Display
from syncline.resolve import resolve
from syncline.running import keeping, write_result
from syncline.store import RunFolder, create_run, resumable_run
from syncline.sync import GradientSync, make_sync
from syncline.sync.batch_norm import attach
from syncline.sync.bucketed import WIRE_DTYPES
from syncline.training.calibrate import calibrate, gather_times
from syncline.training.checkpoint import Progress
from syncline.training.delays import delays_of
from syncline.training.loop import Loop
from syncline.training.settings import step_settings
from syncline.training.step import Worker
from syncline.training.watching import StepWatch, note_memory
from syncline.voice import Voice
from syncline.words import IN_FILES
from syncline.workload.data.batches import Batches, ImageBatches
from syncline.workload.data.file_batches import FileBatches, usual_image_size
from syncline.workload.data.image_index import digest
from syncline.workload.data.loading import AheadBatches
from syncline.workload.data.made import made_batches, text_batches
from syncline.workload.data.own import OwnBatches, own_batches
from syncline.workload.data.sources import load_images, load_index
from syncline.workload.dry_run import check_fit
from syncline.workload.inputs import is_cifar_shaped, usual_input
from syncline.workload.recipes import make_model, make_optimizer
from syncline.workload.recorded import load_times
from syncline.workload.replay import ReplayedBatches
from syncline.workload.sharding import Sharding


def train(
    plan: Plan, run: RunFolder, resume: bool, voice: Voice, backend: Communicator | None = None
) -> dict[str, Any] | None:
    """A rank's part in `syncline train`. Rank 0 returns the summary."""
    number = place_of(plan).rank
    with reached(run, [number]) as here:
        if stacks.file_here() is None:  # another launcher started this process
            stacks.write_on_signal(here.logs, number)
        with joined(plan, here.path / "events", backend) as rank:
            return _train(rank, here, resume=resume or rank.restarted, voice=voice)


def compare(plan: Plan, run: RunFolder, methods: Sequence[str], voice: Voice) -> list[dict[str, Any]]:
    """A rank's part in `syncline compare`: the rows of the table."""
    with (
        reached(run, [place_of(plan).rank]) as here,
        joined(plan, here.path / "events") as rank,
        Display(voice, rank=rank.number, unit="turn") as display,
    ):
        display.doing("loading data")
        batches = _batches(rank)
        display.counted = batches.task.unit
        display.doing("timing compute alone")
        _calibrate(rank, here, batches)
        display.doing("building the models")
        threads = plan.threads or 1  # where compute is slept, more of them change nothing
        entries = contenders(methods, threads=threads, cores=threads if plan.replayed else cores())
        parts = (rank.communicator, batches, rank.device, rank.log, display)
        meter = LoadMeter()
        rows = Comparison(plan, entries, *parts).run()
        other_load = meter.others(rank.communicator)
        return [{**row, "other_load": other_load, "train_samples": batches.num_train} for row in rows]


def probe(
    plan: Plan, backends: Sequence[str], sizes: Sequence[int], visits: int, voice: Voice
) -> list[dict[str, Any]]:
    """A rank's part in `syncline probe`: the rows of the table."""
    with joined(plan, None) as rank, Display(voice, rank=rank.number, unit="visit") as display:
        # Below the wrappers: what is measured is the backend, and every value is compared here.
        return run_probe(rank.communicator.backend, backends, sizes, visits, display)


def certify(plan: Plan, methods: Sequence[str], models: Sequence[str], voice: Voice) -> list[dict[str, Any]]:
    """A rank's part in `syncline verify`: the certificates, on rank 0."""
    rows = []
    with joined(plan, None) as rank, Display(voice, rank=rank.number, unit="certificate") as display:
        by_input = {usual_input(model): _batches(rank, plan.replace(model=model)) for model in models}
        pairs = [(model, method) for model in models for method in methods]
        for done, (model, method) in enumerate(pairs):
            display.progress(done, len(pairs), f"{model} {method}")
            if METHODS[method].alone and rank.number != 0:
                continue
            certificate = _certifier(rank, plan.replace(model=model), method, by_input[usual_input(model)]).run()
            if certificate is not None:
                place = {"workers": plan.workers, "model": model, "method": method}
                rows.append({**place, "passed": certificate.passed, **asdict(certificate)})
    return rows


def call(plan: Plan, name: str) -> list[dict[str, Any]]:
    """A rank's part in a study's experiment: FILE.py:function or module:function, called with the joined rank; rows
    from rank 0."""
    from syncline.study.lab_code import run_call

    with joined(plan, None) as rank:
        return run_call(name, rank)


def _certifier(rank: Rank, plan: Plan, method: str, batches: Batches) -> Certifier:
    communicator, workers = rank.communicator, plan.workers
    if METHODS[method].alone:
        communicator = ThreadCommunicator(ThreadWorld(1, deadline_s=plan.deadline_s), 0)
    # One more than divides by the world size: uneven shards on purpose.
    sharding = Sharding(1000, 4 * workers + 1, plan.seed, rank.number, workers)
    rank.log.method = method
    options = {"batch_norm": plan.batch_norm, **plan.options_for(method)}
    if "barrier" in METHODS[method].options:
        options = {"barrier": False, **options}  # what is certified is what it does beyond waiting
    wire = options.get("transfer_dtype")
    exact = {name: value for name, value in options.items() if name != "transfer_dtype"}
    return Certifier(
        communicator=communicator,
        make_sync=lambda communicator: make_sync(method, communicator, **options),
        make_exact=(lambda communicator: make_sync(method, communicator, **exact)) if wire else None,
        wire_dtype=WIRE_DTYPES[wire] if wire else None,
        make_model=lambda: make_model(plan, rank.device, batches.task),
        batches=batches,
        sharding=sharding,
        log=rank.log,
        batch_norm=plan.batch_norm,
        precision=plan.precision,
    )


def _train(rank: Rank, run: RunFolder, *, resume: bool, voice: Voice) -> dict[str, Any] | None:
    plan = rank.plan
    with Display(voice, rank=rank.number) as display:
        display.doing("loading data")
        batches = _batches(rank)
        display.counted = batches.task.unit
        worker, sharding = _prepared(rank, run, batches, display, resume=resume)
        display.doing("taking the first step")
        checkpoints = None if plan.replayed else run.checkpoint_files
        watch_steps = StepWatch(rank.log, plan.profile, run.path / "profile")
        loop = Loop(plan, worker, sharding, rank.communicator, display, checkpoints, watch_steps)
        meter = LoadMeter()
        progress, seconds = loop.run(resume=resume)
        other_load = meter.others(rank.communicator)
    note_memory(rank.log, worker.model, worker.sync)
    summary = {"other_load": other_load} | _summary(plan, batches, worker.model, progress, seconds)
    summary["predicted"] = _predicted(worker.sync, seconds)
    return summary if rank.number == 0 else None


def _prepared(
    rank: Rank, run: RunFolder, batches: Batches, display: Display, *, resume: bool
) -> tuple[Worker, Sharding]:
    """All that comes before the first step: the model, what compute costs by itself, and the method."""
    plan = rank.plan
    display.doing(f"building {plan.model}")
    model = make_model(plan, rank.device, batches.task)
    sharding = Sharding(batches.num_train, plan.global_batch, plan.seed, rank.number, plan.num_ranks)
    if not plan.replayed:
        check_fit(plan, model, batches.task, sharding, plan.steps or sharding.steps_per_epoch)
    if not resume:
        display.doing("timing compute alone")
        _calibrate(rank, run, batches)
    rank.log.method = plan.method
    options = {"batch_norm": plan.batch_norm, **plan.options_for(plan.method)}
    sync = make_sync(plan.method, rank.communicator, log=rank.log, **options)
    sync.looks_for_nan = step_settings(plan)["on_nan"] != "ignore"
    display.doing("sharing the first weights")
    module = attach(sync, model, plan.batch_norm)
    settings = {"delays": delays_of(plan, rank.number), "accumulate": plan.accumulate, **step_settings(plan)}
    return Worker(model, module, sync, make_optimizer(plan, model), batches, rank.log, **settings), sharding


def _calibrate(rank: Rank, run: RunFolder, batches: Batches) -> None:
    """What compute costs by itself, before the run: into the log and, layer by layer, into compute.json."""
    plan, communicator = rank.plan, rank.communicator
    if plan.replayed:
        times = load_times(plan.compute)  # a copy: the run folder says by itself what was slept
    elif plan.measure.calibration == 0:
        return
    else:
        model = make_model(plan, rank.device, batches.task)
        optimizer, alone = make_optimizer(plan, model), make_sync(BASELINE, communicator)
        worker = Worker(model, alone.attach(model), alone, optimizer, batches, rank.log, **step_settings(plan))
        sharding = Sharding(batches.num_train, plan.global_batch, plan.seed, rank.number, communicator.world_size)
        steps = calibrate(worker, sharding, plan.measure.calibration, communicator)
        samples = -(-plan.global_batch // communicator.world_size)
        about = {"model": plan.model, "threads": plan.threads or 1, "samples": samples, "precision": plan.precision}
        about["num_train"] = batches.num_train
        times = gather_times(steps, model, communicator, about)
    if rank.number == 0:
        run.write_compute(times.to_json())


def _summary(
    plan: Plan, batches: Batches, model: torch.nn.Module, progress: Progress, seconds: list[float]
) -> dict[str, Any]:
    measured = timing(seconds, warmup=plan.measure.warmup, window=plan.measure.window)
    return {
        "method": plan.method,
        "workers": plan.workers,
        "threads": plan.threads,
        "compute": plan.compute_note,
        "data": batches.source,
        "loading": batches.throughput() if isinstance(batches, AheadBatches | FileBatches) else None,
        "task": batches.task.name,
        "train_samples": batches.num_train,
        "steps": progress.step,
        "timed_steps": len(seconds),
        "step": asdict(measured) if measured else None,
        **(batches.task.throughput(_batch(plan, batches), measured.median_s) if measured else {}),
        "seconds": counted(seconds, warmup=plan.measure.warmup, window=plan.measure.window),
        "losses": progress.loss_lines,
        "epochs": progress.epochs,
        "weights_sha256": None if plan.replayed else _digest(model),
    }


def _batch(plan: Plan, batches: Batches) -> int:
    """Samples of a step: where there are fewer than the plan asks for, all of them."""
    return min(plan.global_batch, batches.num_train)


def _predicted(sync: GradientSync, seconds: list[float]) -> dict[str, Any] | None:
    """What the method expects of a step, beside what the steps took that came after it had planned them."""
    if sync.predicted is None:
        return None
    planned = seconds[PLANNED_AFTER:]
    return {**sync.predicted, "measured_s": statistics.median(planned) if planned else None}


def _digest(model: torch.nn.Module) -> str:
    """Two runs that end in the same place to the bit have the same digest."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _batches(rank: Rank, plan: Plan | None = None) -> Batches:
    plan = plan or rank.plan
    if plan.replayed:
        times = load_times(plan.compute)
        return ReplayedBatches(times.data_s, num_train=times.num_train, source=plan.compute_note)
    inner: Batches
    if plan.has_own_data:
        inner = _own_batches(rank, plan)
    elif plan.data in IN_FILES:
        inner = _file_batches(rank)
    elif plan.data == "text":
        inner = text_batches(plan)
    elif plan.data.startswith("synthetic") and not is_cifar_shaped(plan):
        inner = made_batches(plan)
    else:
        images = load_images(plan.data, Path(plan.data_dir) if plan.data_dir else None)
        inner = ImageBatches(images, seed=plan.seed, channels_last=plan.channels_last)
    if not plan.loaders:
        return inner
    shard_size = -(-plan.global_batch // plan.num_ranks)
    batches = AheadBatches(inner, num_loaders=plan.loaders, shard_size=shard_size, pinned=rank.device.type == "cuda")
    rank.at_end.callback(batches.close)
    return batches


def _file_batches(rank: Rank) -> FileBatches:
    plan = rank.plan
    index = load_index(plan.data, Path(plan.data_dir or ""))
    _check_same_samples(rank, digest(index), f"The images in {index.folder}")
    size = plan.image_size or usual_image_size(plan.model)
    return FileBatches(index, size=size, seed=plan.seed, channels_last=plan.channels_last)


def _own_batches(rank: Rank, plan: Plan) -> OwnBatches:
    batches = own_batches(plan)
    if batches.task.own_loss is not None and plan.optimizer.label_smoothing:
        raise PlanError(
            f"recipe {plan.recipe} smooths labels, which the loss of data {plan.data} does not do.",
            action="Add --set optimizer.label_smoothing=0.",
        )
    _check_same_samples(rank, batches.digest(), f"What data {plan.data} gives")
    return batches


def _check_same_samples(rank: Rank, digest: bytes, what: str) -> None:
    """Hosts may have copies of the data that differ; a global batch would then mean something else on each."""
    own_digest = torch.frombuffer(bytearray(digest), dtype=torch.int64).to(rank.communicator.device)
    with rank.communicator.scope("same samples"):
        digests = [part.item() for part in rank.communicator.all_gather(own_digest)]
    differing = [number for number, other in enumerate(digests) if other != digests[0]]
    if differing:
        ranks = ", ".join(map(str, differing))
        verb = "differ" if what.startswith("The images") else "differs"
        raise DataError(f"{what} {verb} between rank 0 and rank {ranks}.", action="Copy rank 0's.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Train a plan as one rank of a world that another launcher started."""
    parser = argparse.ArgumentParser(prog="python -m syncline.worker", description=main.__doc__)
    parser.add_argument("plan", type=Path, help="the plan, a TOML file")
    parser.add_argument("--run-dir", help="where to write the run; by default, a new folder")
    parser.add_argument("--resume", action="store_true", help="continue the run in --run-dir")
    options = parser.parse_args(arguments)
    watch.watch_parent()
    try:
        if is_url(options.run_dir):
            raise RunFolderError(
                f"{options.run_dir} is a URL, which `syncline train` takes.",
                action="Give a folder that all ranks see.",
            )
        folder = Path(options.run_dir) if options.run_dir else None
        summary = _train_elsewhere(options.plan, folder, resume=options.resume)
    except SynclineError as error:
        notes = getattr(error, "__notes__", ())
        print(*notes, f"syncline: {error}", sep="\n", file=sys.stderr, flush=True)
        return error.exit_code
    if summary is not None and summary["weights_sha256"]:
        print(f"weights {summary['weights_sha256']}")
    return 0


def _train_elsewhere(plan_path: Path, run_dir: Path | None, *, resume: bool) -> dict[str, Any] | None:
    """Rank 0 finds the data and owns the run folder, since no launcher knows of it; the others wait to be told."""
    plan = load_plan(plan_path, {})
    place = place_of(plan)
    backend, voice = backend_of(plan, place), Voice("all")
    if place.rank != 0:
        run = RunFolder(Path(backend.store.get("run").decode()))
        return train(run.plan(), run, resume, voice, backend)
    plan, sentence = resolve(plan, ranks_per_host=place.local_world_size, num_hosts=place.num_hosts)
    label = f"{plan.method}-{plan.workers}"
    run = resumable_run(run_dir) if resume else create_run(run_dir, kind="train", plan=plan, label=label)
    backend.store.set("run", str(run.path.resolve()))
    print(f"{sentence}\nrun folder {run.path}", flush=True)
    with keeping(run, resumed=resume):
        watch.on_stop(lambda: run.set_status("stopped"))
        summary = train(run.plan(), run, resume, voice, backend)
        assert summary is not None
        write_result(run, plan, summary, machines=place.num_hosts)
    return summary


if __name__ == "__main__":
    with aborting():
        sys.exit(main())
