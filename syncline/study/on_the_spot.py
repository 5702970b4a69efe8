"""Studies without a file: a scaling curve, and stored runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from syncline.accounting.breakdown import PARTS
from syncline.errors import PlanError
from syncline.forms import checked
from syncline.methods import BASELINE
from syncline.study.file import Study


def side_by_side(names: Sequence[str]) -> Study:
    """Runs of these names in one table."""
    methods = {"title": "Runs side by side", "stage": "runs"}
    return checked(
        Study,
        {
            "title": "Runs side by side" if len(names) > 1 else f"Run {names[0]}",
            "question": "What did these runs cost, and what did they reach?",
            "answer": "fastest",
            "answer_stage": "runs",
            "stage": [{"name": "runs"}],
            "table": [
                {**methods, "rows": ["method", "workers"], "values": ["step", "throughput", "loss"], "main": True},
                {
                    **methods, "title": "Where the step goes", "rows": ["method", "workers"],
                    "values": [*PARTS, "overlap"],
                },
                {
                    **methods, "title": "Loss and accuracy", "rows": ["method", "workers"],
                    "values": ["train_loss", "train_accuracy", "test_loss", "test_accuracy"],
                },
            ],
            "figure": [
                {
                    "title": "Where the step goes", "stage": "runs", "kind": "stacked", "x": "method", "main": True,
                    "values": list(PARTS),
                },
                {"title": "Loss against iteration", "stage": "runs", "kind": "loss"},
            ],
        },
        "the report",
    )  # fmt: skip


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
                "values": list(PARTS),
            },
        ],
    }  # fmt: skip
    return checked(Study, values, "the scaling study")


def with_one(workers: Sequence[int]) -> list[int]:
    """The world sizes in order, with one worker: it is the baseline of every speed-up."""
    sizes = sorted(set(workers))
    if not sizes or sizes[0] < 1:
        raise PlanError(f"{sizes[0] if sizes else 'no'} workers cannot run.", action="Ask for at least one worker.")
    return sizes if 1 in sizes else [1, *sizes]
