"""Does every built-in model learn with the settings that it gets by default, also with small batches?

    python benchmarks/defaults.py --save
    python benchmarks/defaults.py --models bert-small --text tinyshakespeare.txt

Each model trains for some steps with recipe `default`, on one worker. The table shows the mean loss over the first
and the last tenth of the steps, and the highest over any tenth between them: a run that diverges shows it there.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support import write_result

import syncline


@dataclass(frozen=True)
class Case:
    data: str
    steps: int
    batch: int = 8
    settings: dict[str, Any] = field(default_factory=dict)


SMALL: dict[str, Any] = {"image_size": 64}
"""Small images of the large models, so that a step takes a second at most."""
CASES = {
    "mlp": [Case("cifar10", 300), Case("cifar10", 100, 256)],
    "cnn": [Case("cifar10", 300), Case("cifar10", 100, 256)],
    "vgg11-quarter": [Case("cifar10", 300), Case("cifar10", 100, 256)],
    "vgg11": [Case("cifar10", 200)],
    "resnet18": [Case("cifar10", 150)],
    "resnet50": [
        Case("synthetic-ages", 100, settings=SMALL),
        Case("synthetic", 100, settings={**SMALL, "num_classes": 10}),
    ],
    "resnet18-imagenet": [Case("synthetic-ages", 100, settings=SMALL)],
    "vgg16": [Case("synthetic-ages", 60, settings=SMALL)],
    "inception-v3": [Case("synthetic-ages", 60, settings={"image_size": 96})],
    "bert-small": [Case("text", 309)],
}


def losses_of(model: str, case: Case, text: str | None) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        run = syncline.train(
            model=model, data=case.data, data_dir=text if case.data == "text" else None, method="single", threads=1,
            steps=case.steps, global_batch=case.batch, run_dir=Path(folder) / "run",
            settings={"evaluate": False, "measure.calibration": 0, **case.settings},
        )  # fmt: skip
        losses: list[float] = run.losses()["loss"].to_list()
        return losses


def row(model: str, case: Case, losses: list[float]) -> str:
    size = max(1, len(losses) // 10)
    tenths = [statistics.mean(losses[start : start + size]) for start in range(0, len(losses) - size + 1, size)]
    what = ", ".join([case.data, *(f"{key} {value}" for key, value in case.settings.items())])
    return (
        f"| {model} | {what} | {case.batch} | {case.steps} | {tenths[0]:.3f} | {max(tenths[1:-1]):.3f} "
        f"| {tenths[-1]:.3f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(name for name in CASES if name != "bert-small"))
    parser.add_argument("--text", help="a text file for BERT")
    parser.add_argument("--save", action="store_true", help="save the result next to this script")
    chosen = parser.parse_args()
    rows = [
        "| model | data | batch | steps | first tenth | highest between | last tenth |",
        "|---|---|---|---|---|---|---|",
    ]
    for model in chosen.models.split(","):
        for case in CASES[model]:
            rows.append(row(model, case, losses_of(model, case, chosen.text)))
            print(rows[-1], flush=True)
    lines = ["Recipe `default`, one worker, one thread; mean training loss.", "", *rows]
    write_result("defaults", lines, save=chosen.save)


if __name__ == "__main__":
    main()
