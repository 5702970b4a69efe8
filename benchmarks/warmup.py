"""Does warm-up help with large batches, and which one? Quarter-width VGG-11 on CIFAR-10, three seeds.

    python benchmarks/warmup.py --save

Goyal et al. (2017) found, for ResNet-50 on ImageNet with 256 to 8192 images a batch: a gradual ramp is better than no
warm-up, and no warm-up is better than a constant warm-up (a low rate for the first epochs, then a jump). Here the
same three on a small scale: recipe large-batch, one worker, differing in `optimizer.warmup` and seed alone.

If you stop it, rerunning it skips the runs that have finished.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from support import write_result

WARMUPS = ("gradual", "none", "constant")
"""In the order of Goyal et al., best first."""
SEEDS = (1, 2, 3)


def trained(chosen: argparse.Namespace, warmup: str, seed: int) -> dict[str, Any]:
    """The summary of one run; of a run that was finished before, what it wrote."""
    run = Path(chosen.runs) / f"{warmup}-{seed}"
    if not (run / "summary.json").exists():
        settings = {
            "optimizer.warmup": warmup,
            "optimizer.warmup_epochs": chosen.warmup_epochs,
            "optimizer.learning_rate": chosen.learning_rate,
            "deadline_s": 7200,
            "measure.calibration": 0,
        }
        command = [sys.executable, "-c", "from syncline.cli import main; main()", "train", "--method", "single"]
        command += ["--model", "vgg11-quarter", "--data", chosen.data, "--recipe", "large-batch", "--seed", str(seed)]
        command += ["--global-batch", str(chosen.batch), "--epochs", str(chosen.epochs), "--run-dir", str(run)]
        for key, value in settings.items():
            command += ["--set", f"{key}={value}"]
        if (run / "run.json").exists():
            command = [*command[:4], "--resume", str(run)]
        subprocess.run(command, check=True)
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return summary


def table(summaries_of: dict[str, list[dict[str, Any]]]) -> list[str]:
    lines = ["| warm-up | test accuracy by seed | mean | deviation | training loss of the first epoch, mean |"]
    lines.append("|---|---|---|---|---|")
    for warmup, summaries in summaries_of.items():
        values = accuracies(summaries)
        first = statistics.mean(summary["epochs"][0]["train_loss"] for summary in summaries)
        spread = f"{statistics.stdev(values):.2%}" if len(values) > 1 else "-"
        each = ", ".join(f"{value:.2%}" for value in values)
        lines.append(f"| {warmup} | {each} | {statistics.mean(values):.2%} | {spread} | {first:.3f} |")
    return lines


def accuracies(summaries: list[dict[str, Any]]) -> list[float]:
    return [summary["epochs"][-1]["test_accuracy"] for summary in summaries]


def findings(summaries_of: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Each step of the order seed by seed, because runs of one seed share their weights and batches."""
    lines = []
    for better, worse in pairwise(WARMUPS):
        pairs = zip(accuracies(summaries_of[better]), accuracies(summaries_of[worse]), strict=True)
        gains = [first - second for first, second in pairs]
        if all(gain > 0 for gain in gains):
            verdict = "as in Goyal et al., with every seed"
        elif all(gain < 0 for gain in gains):
            verdict = "the opposite of Goyal et al., with every seed"
        else:
            verdict = "undecided: seeds disagree"
        each = ", ".join(f"{100 * gain:+.2f}" for gain in gains)
        lines.append(f"- {better} against {worse}: {each} points by seed: {verdict}.")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--warmup-epochs", type=float, default=1.0)
    parser.add_argument("--learning-rate", type=float, default=0.04, help="for a batch of 256; scaled by batch / 256")
    parser.add_argument("--runs", help="folder of the nine runs; default runs/warmup-RATE")
    parser.add_argument("--save", action="store_true", help="save the result next to this script")
    chosen = parser.parse_args()
    name = f"warmup-{chosen.learning_rate:g}"
    chosen.runs = chosen.runs or f"runs/{name}"
    # Seed by seed, so that a study which is stopped has compared something.
    summaries_of: dict[str, list[dict[str, Any]]] = {warmup: [] for warmup in WARMUPS}
    for seed in SEEDS:
        for warmup in WARMUPS:
            summaries_of[warmup].append(trained(chosen, warmup, seed))
    shape = f"vgg11-quarter on {chosen.data}, batch {chosen.batch}, {chosen.epochs} epochs, cosine"
    peak = chosen.learning_rate * chosen.batch / 256
    rates = f"rate {chosen.learning_rate:g} for a batch of 256, {peak:g} when scaled"
    lines = [f"{shape}; {rates}; warm-up of {chosen.warmup_epochs:g} epochs; seeds {', '.join(map(str, SEEDS))}.", ""]
    write_result(name, [*lines, *table(summaries_of), "", *findings(summaries_of)], save=chosen.save)


if __name__ == "__main__":
    main()
