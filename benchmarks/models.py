"""Every model at its usual input, a few steps on 2 workers: samples per second by method, and whether losses agree.

    python benchmarks/models.py --save

Synthetic data; methods take turns step by step on the same batches and dropout masks, so that their last losses can
be compared, at a rate at which no model's loss explodes: that would make rounding errors explode too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from typing import Any

from support import write_result

BATCH_PER_WORKER = {
    "vgg11": 16, "vgg11-quarter": 16, "vgg16": 2, "resnet18": 16, "resnet18-imagenet": 4, "resnet50": 4,
    "inception-v3": 4, "bert-base": 2, "bert-small": 4, "cnn": 16, "mlp": 16,
}  # fmt: skip
METHODS = ("ddp", "bucketed", "shared-memory")
LEARNING_RATE = 0.01
SAME = 1e-4
"""How far apart losses may lie, of their size: sums in another order round differently, and steps let it grow."""


def measured(model: str, steps: int) -> list[dict[str, Any]]:
    """The rows of `syncline compare`."""
    command = [sys.executable, "-c", "from syncline.cli import main; main()", "compare", "--model", model]
    command += ["--data", "synthetic", "--workers", "2", "--threads", "1", "--methods", ",".join(METHODS)]
    command += ["--global-batch", str(2 * BATCH_PER_WORKER[model]), "--steps", str(steps), "--warmup", "1", "--json"]
    command += ["--set", f"optimizer.learning_rate={LEARNING_RATE}"]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([*command, "--run-dir", f"{folder}/run"], stdout=subprocess.PIPE, text=True, check=True)
    rows: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(BATCH_PER_WORKER))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="save the result next to this script")
    given = parser.parse_args()
    lines = [f"| model | samples per worker | {' | '.join(METHODS)} | per second | last losses |"]
    lines.append("|---" * (len(METHODS) + 4) + "|")
    differing = []
    for model in given.models.split(","):
        print(f"{model} …", file=sys.stderr, flush=True)
        rows = measured(model, given.steps)
        (unit,) = {key.removesuffix("_per_s") for row in rows for key in row if key.endswith("_per_s")}
        rates = " | ".join(f"{row[f'{unit}_per_s']:.4g}" for row in rows)
        losses = [row["loss"] for row in rows]
        apart = max(losses) - min(losses)
        said = f"{losses[0]:.5g}, {apart / abs(losses[0]):.1g} apart"
        lines.append(f"| {model} | {BATCH_PER_WORKER[model]} | {rates} | {unit} | {said} |")
        if apart > SAME * abs(losses[0]):
            differing.append(f"{model}: losses differ: {dict(zip(METHODS, losses, strict=True))}")
    write_result("models", [*lines, "", *differing], save=given.save)
    if differing:
        sys.exit(1)


if __name__ == "__main__":
    main()
