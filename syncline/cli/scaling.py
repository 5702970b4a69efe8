"""One scaling curve, as a study made on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from syncline.cli.studies import StudyRun, open_study
from syncline.errors import PlanError
from syncline.forms import checked
from syncline.methods import BASELINE, current_name
from syncline.report.tables import print_table
from syncline.store import ROOT
from syncline.study.cells import Ground
from syncline.study.file import Study
from syncline.study.tables import build_table


def scale_curve(
    *, method: str, workers: str, strong: bool, batch: int, threads: int, steps: int, link: str | None,
    plan: dict[str, Any], out: Path | None,
) -> Path:  # fmt: skip
    """Run it, print its table, write its report; returns the page."""
    method, sizes = current_name(method, typed=True), _sizes(workers)
    kind = "strong" if strong else "weak"
    study = scaling_study(method, sizes, strong=strong, batch=batch, threads=threads, steps=steps, plan=plan)
    ground = Ground(max(sizes), link) if link else Ground()
    folder = out or ROOT / f"scale-{method}-{kind}-{'-'.join(map(str, sizes))}{f'-{link}' if link else ''}"
    flags = f"--method {method} --workers {workers} --{kind} --batch {batch} --threads {threads} --steps {steps}"
    run = StudyRun(study, folder, ground, False, f"syncline scale {flags}{f' --hosts --link {link}' if link else ''}")
    run.check()
    open_study(folder, study.title)
    run.run()
    for spec in study.table:
        table = build_table(spec, run.rows)
        print_table(table.columns, table.rows, title=table.title)
        for warning in table.warnings:
            print(f"{warning.rule}: {warning.text}")
    print(run.answer())
    return run.report(folder / "report", answers=True)


def scaling_study(
    method: str, sizes: list[int], *, strong: bool, batch: int, threads: int, steps: int, plan: dict[str, Any]
) -> Study:
    """`single` takes turns with the method in every cell: the baseline is measured under the same load."""
    kind = "one global batch (strong)" if strong else "one batch per worker (weak)"
    methods = list(dict.fromkeys((BASELINE, method)))
    stage = {
        "name": "scale",
        "methods": methods,
        "grid": {"nodes": sizes},
        "plan": {"global_batch" if strong else "batch_per_worker": batch},
    }
    title = f"Scaling of {method} at {kind}"
    values: dict[str, Any] = {
        "title": title,
        "question": f"What do {', '.join(map(str, sizes))} workers give with {method}, at {kind}?",
        "answer": "scaling",
        "answer_stage": "scale",
        "plan": {"threads": threads, "steps": steps, "evaluate": False, **plan},
        "stage": [stage],
        "table": [
            {
                "title": title, "stage": "scale", "rows": ["workers", "method"], "main": True,
                "values": ["step", "throughput", "speedup", "efficiency", "communication_share", "overlap"],
            }
        ],
        "figure": [
            {
                "title": "Speed-up", "stage": "scale", "kind": "lines", "x": "workers", "values": ["speedup"],
                "where": {"method": method}, "main": True,
            },
            {
                "title": "Where the step goes", "stage": "scale", "kind": "stacked", "x": "workers",
                "where": {"method": method},
                "values": ["data", "forward", "backward", "pack", "wait", "wire", "update", "other"],
            },
        ],
    }  # fmt: skip
    return checked(Study, values, "the scaling study")


def _sizes(text: str) -> list[int]:
    try:
        sizes = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise PlanError(f"--workers {text!r} is not a list of numbers.", action="Write it as 1,2,4.") from None
    if sizes[0] < 1:
        raise PlanError(f"{sizes[0]} workers cannot run.", action="Ask for at least one worker.")
    return sizes if 1 in sizes else [1, *sizes]
