"""Composition root: fill what a plan leaves open (data, threads) before any rank starts. Loads no torch."""

from __future__ import annotations

from pathlib import Path

from syncline.launcher.local import default_threads
from syncline.plan import Plan
from syncline.workload.images import Progress
from syncline.workload.sources import check_images, choose_images


def resolve(plan: Plan, *, ranks_per_host: int, progress: Progress | None = None) -> tuple[Plan, str]:
    """The plan with nothing left to choose, and a sentence on the data. Fetches data and checks every byte."""
    choice = choose_images(plan.data, Path(plan.data_dir) if plan.data_dir else None, progress=progress)
    sentence = check_images(choice)
    changes = {"data": choice.name, "threads": plan.threads or default_threads(ranks_per_host)}
    if choice.folder is not None:
        changes["data_dir"] = str(choice.folder)
    return plan.replace(**changes), sentence
