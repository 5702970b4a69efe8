"""syncline data: find or fetch a data set, verify it, and say what is in it."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Annotated

import typer

from syncline.cli import options
from syncline.plan import Plan, load_plan
from syncline.voice import Voice
from syncline.words import IN_FILES

TRIED = 256
"""Images that are decoded to say how fast it goes."""


def data(
    name: Annotated[str, typer.Argument(help="cifar10, synthetic, auto, imdb-wiki or folder.")] = "cifar10",
    data_dir: options.DataDir = None,
) -> None:
    """Find or fetch a data set, and verify it."""
    from syncline.resolve import resolve

    plan = load_plan(None, {"data": name, "data_dir": str(data_dir) if data_dir else None})
    plan, sentence = resolve(plan, ranks_per_host=1, progress=Voice("all").fetched)
    print(sentence)
    if plan.data in IN_FILES:
        _describe_files(plan)
    where = f" --data-dir {shlex.quote(str(data_dir))}" if data_dir else ""
    print(f"next: syncline train --data {plan.data}{where}")


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
