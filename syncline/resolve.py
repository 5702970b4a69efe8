"""Composition root: fill what a plan leaves open (data, threads, method) before any rank starts. Loads no torch."""

from __future__ import annotations

import platform
from pathlib import Path

from syncline.launcher.local import default_threads
from syncline.launcher.machine import STRONG_MEMORY_ORDER
from syncline.plan import Plan
from syncline.workload.images import Progress
from syncline.workload.sources import check_images, choose_images


def resolve(
    plan: Plan, *, ranks_per_host: int, num_hosts: int = 1, progress: Progress | None = None
) -> tuple[Plan, str]:
    """The plan with nothing left to choose, and a sentence on what was chosen. Fetches data and checks every byte."""
    choice = choose_images(plan.data, Path(plan.data_dir) if plan.data_dir else None, progress=progress)
    sentence = check_images(choice)
    changes = {"data": choice.name, "threads": plan.threads or default_threads(ranks_per_host)}
    if choice.folder is not None:
        changes["data_dir"] = str(choice.folder)
    if plan.method == "auto":
        changes["method"], why = choose_method(device=plan.device, workers=plan.workers, num_hosts=num_hosts)
        sentence += f" Method {changes['method']}: {why}."
    return plan.replace(**changes), sentence


def choose_method(*, device: str, workers: int, num_hosts: int) -> tuple[str, str]:
    """What `auto` stands for, and why. Never a lossy one."""
    if workers == 1:
        return "single", "there is one worker"
    if device != "cpu":
        return "bucketed", "the model is not on the cpu"
    if num_hosts > 1:
        return "bucketed", "ranks are on several hosts"
    if platform.machine() not in STRONG_MEMORY_ORDER:
        return "bucketed", f"shared memory is not proven on {platform.machine()}"
    return "shared-memory", "all ranks are on one host"
