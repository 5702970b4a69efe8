"""syncline models, data and schedule: what there is to train, and how an all-reduce travels."""

from __future__ import annotations

import shlex
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from syncline.cli import options
from syncline.errors import PlanError
from syncline.plan import Plan, load_plan
from syncline.report.terminal import print_table
from syncline.units import format_bytes
from syncline.voice import Voice
from syncline.words import IN_FILES, MODELS


def models(
    as_json: options.Json = False,
    names: Annotated[list[str] | None, typer.Argument(help="Models to list; default all.")] = None,
) -> None:
    """List the models: parameters, bytes of gradients, operations per sample.

    At each model's usual input and number of classes; with other data they are the data's.
    """
    from syncline.plan import load_plan
    from syncline.workload.dry_run import profile

    for name in names or ():
        load_plan(None, {"model": name})
    profiles = [profile(name) for name in names or MODELS]
    if as_json:
        about = {name: model.about for name, model in MODELS.items()}
        options.print_json([asdict(one) | {"about": about.get(one.name, "")} for one in profiles])
        return
    rows = [
        [
            one.name,
            f"{one.parameters:,}",
            format_bytes(one.gradient_bytes),
            _giga(one.forward_flops),
            _giga(one.training_flops),
            "x".join(map(str, one.input_shape)) + (" tokens" if one.unit == "tokens" else ""),
            f"{one.num_classes:,}",
        ]
        for one in profiles
    ]
    columns = ["model", "parameters", "gradients", "GFLOPs forward", "GFLOPs training", "input", "classes"]
    caption = (
        "GFLOPs: per sample, multiplications and additions of convolutions and matrix products; training is\n"
        "forward and backward. Your own model: module:callable. Next: syncline train --model NAME --data synthetic"
    )
    print_table(columns, rows, caption=caption)


def _giga(flops: int) -> str:
    return f"{flops / 1e9:.3g}"


TRIED = 256
"""Images that are decoded to say how fast it goes."""


def data(
    name: Annotated[
        str, typer.Argument(help="cifar10, synthetic, auto, imdb-wiki, folder or text; or your own: module:callable.")
    ] = "cifar10",
    data_dir: options.DataDir = None,
) -> None:
    """Find or fetch a data set, and verify it."""
    from syncline.resolve import resolve

    plan = load_plan(None, {"data": name, "data_dir": str(data_dir) if data_dir else None})
    plan, sentence = resolve(plan, ranks_per_host=1, progress=Voice("all").fetched)
    print(_describe_own(plan) if plan.has_own_data else sentence)
    if plan.data in IN_FILES:
        _describe_files(plan)
    where = f" --data-dir {shlex.quote(str(data_dir))}" if data_dir else ""
    print(f"next: syncline train --data {plan.data}{where}")


def _describe_own(plan: Plan) -> str:
    """What a user's callable gives, and what is asked about it."""
    from syncline.workload.data.own import own_batches

    batches = own_batches(plan)
    task, (inputs, targets) = batches.task, batches.test(0, 1)
    each = " and ".join(
        f"{'x'.join(map(str, tensor.shape[1:])) or 'one'} {str(tensor.dtype).removeprefix('torch.')}"
        for tensor in (inputs, targets)
    )
    loss = getattr(task.own_loss, "__name__", "loss") if task.own_loss else "cross_entropy"
    return (
        f"{batches.source} Input and target: {each}. Loss {loss}, metric {task.metric}, {task.num_classes} answers."
    )


def _describe_files(plan: Plan) -> None:
    """The classes, and how fast the files can be decoded here."""
    import numpy as np

    from syncline.workload.data.sources import load_index

    index = load_index(plan.data, Path(plan.data_dir or ""))
    labels = np.concatenate([index.train.labels, index.test.labels])
    if plan.data == "imdb-wiki":
        print(f"ages {labels.min()} to {labels.max()}, {labels.mean():.1f} years on average")
    else:
        sizes = np.bincount(index.train.labels, minlength=len(index.class_names))
        most, least = int(sizes.argmax()), int(sizes.argmin())
        print(
            f"training images per class: {sizes[least]:,} ({index.class_names[least]}) "
            f"to {sizes[most]:,} ({index.class_names[most]})"
        )
    print(_decoding_speed(plan))


def _decoding_speed(plan: Plan) -> str:

    from syncline.workload.data.file_batches import USUAL_SIZE, FileBatches
    from syncline.workload.data.loading import AheadBatches, announced
    from syncline.workload.data.sources import load_index
    from syncline.workload.sharding import Sharding

    num_loaders = plan.loaders or 1
    index = load_index(plan.data, Path(plan.data_dir or ""))
    files = FileBatches(index, size=USUAL_SIZE, seed=plan.seed, channels_last=plan.channels_last)
    count = min(TRIED, files.num_train)
    batch = min(32, count)
    batches = AheadBatches(files, num_loaders=num_loaders, shard_size=batch)
    try:
        started = time.perf_counter()
        for shard in announced(batches, Sharding(count, batch, plan.seed, 0, 1).epoch(0)):
            batches.train(shard)
        seconds = time.perf_counter() - started
    finally:
        batches.close()
    processes = f"{num_loaders} process{'es' if num_loaders > 1 else ''}"
    return f"decoded {count} of them to {USUAL_SIZE}x{USUAL_SIZE} in {processes}: {count / seconds:,.0f} images/s"


def schedule(
    pattern: Annotated[str, typer.Argument(help="root, tree, ring, halving-doubling or direct.")],
    workers: Annotated[int, typer.Option(help="Number of ranks.")] = 4,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File for the drawing; default PATTERN-WORKERS.svg.")
    ] = None,
) -> None:
    """Print and draw the rounds of an all-reduce."""
    from syncline.collectives.patterns import PATTERNS, make_schedule
    from syncline.report.schedules import schedule_svg, schedule_text

    if pattern not in PATTERNS:
        raise PlanError(f"unknown pattern {pattern!r}.", action=f"Choose one of {', '.join(PATTERNS)}.")
    if not 1 <= workers <= 64:
        raise PlanError(f"--workers {workers} cannot be drawn.", action="Choose 1 to 64.")
    made = make_schedule(pattern, workers)
    target = output or Path(f"{pattern}-{workers}.svg")
    try:
        target.write_text(schedule_svg(made))
    except OSError as error:
        raise PlanError(f"cannot write {target}: {error.strerror}.", action="Choose another --output.") from error
    print(schedule_text(made))
    print(f"drawn in {target}; next: syncline compare --methods ddp,bucketed,ring,tree,halving-doubling")
