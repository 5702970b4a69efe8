"""Does 16-bit compute cost accuracy? Recipe fast on CIFAR-10 in float32 and in bf16, seed by seed.

    python benchmarks/precision_accuracy.py --save

Two runs of one seed start from the same weights and see the same batches; they differ in `precision` alone, so their
difference says more than that of two means. One worker, one thread. If you stop it, rerunning it skips the runs that
have finished.
"""

from __future__ import annotations

import argparse
import math
import statistics
from pathlib import Path
from typing import Any

from support import write_result

import syncline

PRECISIONS = ("float32", "bf16")


def trained(chosen: argparse.Namespace, precision: str, seed: int) -> dict[str, Any]:
    """The summary of one run; of a run that was finished before, what it wrote."""
    folder = Path(chosen.runs) / f"{precision}-{seed}"
    if (folder / "summary.json").exists():
        return syncline.load_run(folder).summary
    if (folder / "run.json").exists():
        return syncline.resume(folder).summary
    length = {"steps": chosen.steps} if chosen.steps else {"epochs": chosen.epochs}
    return syncline.train(
        model=chosen.model, data="cifar10", method="single", recipe="fast", precision=precision, seed=seed, threads=1,
        global_batch=256, **length, settings={"measure.calibration": 0, "deadline_s": 7200}, run_dir=folder,
    ).summary  # fmt: skip


def accuracy(summary: dict[str, Any]) -> float:
    """On the test images, in per cent."""
    return 100 * float(summary["epochs"][-1]["test_accuracy"])


def table(summaries: dict[int, dict[str, dict[str, Any]]]) -> list[str]:
    lines = [
        "| seed | float32 | bf16 | difference, points | training loss, float32 | bf16 |",
        "|---|---|---|---|---|---|",
    ]
    for seed, pair in summaries.items():
        full, half = (accuracy(pair[precision]) for precision in PRECISIONS)
        losses = [pair[precision]["epochs"][-1]["train_loss"] for precision in PRECISIONS]
        lines.append(
            f"| {seed} | {full:.2f} % | {half:.2f} % | {half - full:+.2f} | {losses[0]:.4f} | {losses[1]:.4f} |"
        )
    return lines


def finding(summaries: dict[int, dict[str, dict[str, Any]]]) -> str:
    gains = [accuracy(pair["bf16"]) - accuracy(pair["float32"]) for pair in summaries.values()]
    if len(gains) < 2:
        return f"bf16 minus float32: {gains[0]:+.2f} points, one seed."
    deviation = statistics.stdev(gains)
    return (
        f"bf16 minus float32: {statistics.mean(gains):+.2f} points on average over {len(gains)} seeds, deviation "
        f"{deviation:.2f} between seeds, standard error of the mean {deviation / math.sqrt(len(gains)):.2f}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="vgg11")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--steps", type=int, help="steps of 256 images instead of whole epochs")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--runs", help="folder of the runs; default runs/precision-accuracy-MODEL")
    parser.add_argument("--save", action="store_true", help="save the result next to this script")
    chosen = parser.parse_args()
    chosen.runs = chosen.runs or f"runs/precision-accuracy-{chosen.model}"
    summaries: dict[int, dict[str, dict[str, Any]]] = {}
    for seed in map(int, chosen.seeds.split(",")):
        # Pair by pair, so that a study which is stopped has compared something.
        summaries[seed] = {precision: trained(chosen, precision, seed) for precision in PRECISIONS}
        print(table(summaries)[-1], flush=True)
    length = f"{chosen.steps} steps" if chosen.steps else f"{chosen.epochs} epoch{'s' if chosen.epochs > 1 else ''}"
    head = f"{chosen.model} on CIFAR-10, recipe fast, batch 256, {length}; accuracy on all 10,000 test images."
    write_result(
        f"precision_accuracy-{chosen.model}", [head, "", *table(summaries), "", finding(summaries)], save=chosen.save
    )


if __name__ == "__main__":
    main()
