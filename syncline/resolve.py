"""Composition root: fill what a plan leaves open (data, threads, method) before any rank starts. Loads no torch."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

from syncline.errors import PlanError
from syncline.machine import STRONG_MEMORY_ORDER, cores, default_threads
from syncline.methods import BASELINE, BETWEEN_HOSTS, IN_MEMORY, ON_LINKS, Unused
from syncline.plan import Plan, compute_source
from syncline.units import format_bytes, format_seconds
from syncline.words import IN_FILES
from syncline.workload.data.images import Progress
from syncline.workload.data.sources import check_images, choose_images
from syncline.workload.data.text import read_text
from syncline.workload.inputs import check_input, image_size, is_cifar_shaped, sequence_length, usual_input
from syncline.workload.recorded import load_times


def resolve(
    plan: Plan, *, ranks_per_host: int, num_hosts: int = 1, progress: Progress | None = None
) -> tuple[Plan, str]:
    """The plan with nothing left to choose, and a sentence on the choices. Downloads data and checks every byte."""
    if plan.replayed:
        changes, sentence = _replayed(plan)
    else:
        changes, sentence = _chosen_data(plan, progress)
        changes["threads"] = plan.threads or default_threads(ranks_per_host)
        name = changes.get("data", plan.data)
        usual = 0 if plan.method_row.world == "tasks" else default_loaders(name, ranks_per_host)
        changes["loaders"] = usual if plan.loaders is None else plan.loaders
    if plan.method_row.is_choice:
        changes["method"], why = choose_for_plan(plan, num_hosts)
        changes["options"] = plan.options_for(changes["method"])
        sentence += f" Method {changes['method']}: {why}."
    return plan.replace(**changes), sentence


def _chosen_data(plan: Plan, progress: Progress | None) -> tuple[dict[str, Any], str]:
    """What `auto` stands for and where the data is; checked, so that no rank starts with data that it cannot read."""
    check_input(plan)
    if plan.has_own_data:  # the ranks make it: it may be large
        folder = {"data_dir": str(Path(plan.data_dir).expanduser().resolve())} if plan.data_dir else {}
        return folder, f"Your own data {plan.data}."
    if plan.data == "text":
        path = Path(plan.data_dir or "").expanduser().resolve()
        return {"data_dir": str(path)}, read_text(path, sequence_length(plan)).source + "."
    if plan.data in ("auto", "synthetic", "synthetic-ages") and not is_cifar_shaped(plan):
        name = "synthetic" if plan.data == "auto" else plan.data
        side = image_size(plan)
        what = f"images of {side}x{side}" if usual_input(plan.model).unit == "images" else "texts"
        return {"data": name}, f"Synthetic data for {plan.model}: {what}."
    choice = choose_images(plan.data, Path(plan.data_dir) if plan.data_dir else None, progress=progress)
    changes = {"data": choice.name, **({"data_dir": str(choice.folder)} if choice.folder is not None else {})}
    return changes, check_images(choice)


def _replayed(plan: Plan) -> tuple[dict[str, Any], str]:
    """Needs no data and learns nothing. The recording decides the model and the batch of each worker."""
    times = load_times(plan.compute)
    kind, path = compute_source(plan.compute)
    changes: dict[str, Any] = {"compute": f"{kind}:{path.resolve()}", "data": "synthetic", "data_dir": None}
    changes |= {"threads": 1, "evaluate": False, "model": times.model or plan.model}
    changes["measure"] = {**plan.measure.model_dump(exclude_none=True), "calibration": 0}
    if plan.precision not in ("float32", times.precision):
        raise PlanError(
            f"precision is {plan.precision}, but the recorded times are for {times.precision}.",
            action=f"Leave precision out, or record a run with precision {plan.precision}.",
        )
    changes["precision"] = times.precision
    if times.samples is not None:
        batch = times.samples * plan.workers
        if "global_batch" in plan.model_fields_set and plan.global_batch != batch:
            raise PlanError(
                f"global_batch is {plan.global_batch}, but the recorded times are for {times.samples} samples per "
                f"worker, which makes {batch} on {plan.workers} workers.",
                action="Leave global_batch out, or record a run with the batch you want.",
            )
        changes["global_batch"] = batch
    sentence = (
        f"Compute is {plan.compute_note}: {format_seconds(times.step_s)} a step, {len(times.backward)} gradients of "
        f"{format_bytes(times.gradient_bytes)} in all, which really travel; nothing is learnt."
    )
    return changes, sentence


def default_loaders(data: str, ranks_per_host: int) -> int:
    """Loader processes per rank: none for images in memory, which are faster to make than to send."""
    return max(1, min(4, cores() // ranks_per_host)) if data in IN_FILES else 0


def choose_for_plan(plan: Plan, num_hosts: int) -> tuple[str, str]:
    not_late = "clipping needs every gradient" if plan.optimizer.clip_norm and not plan.replayed else None
    not_late = not_late or why_no_chunks(plan.options.bucket_cap_mb, plan.options.unused)
    return choose_method(device=plan.device, workers=plan.workers, num_hosts=num_hosts, not_late=not_late)


def why_no_chunks(bucket_cap_mb: float | None, unused: Unused | None) -> str | None:
    """Options of `auto` that ask for buckets, or for every rank's word before an update."""
    if unused == "zero":
        return "parameters may be unused"
    return "a bucket size is given" if bucket_cap_mb is not None else None


def choose_method(*, device: str, workers: int, num_hosts: int, not_late: str | None = None) -> tuple[str, str]:
    """What `auto` stands for, and why. Never a lossy one. `not_late` says why updates cannot be applied late."""
    if workers == 1:
        return BASELINE, "there is one worker"
    if device != "cpu":
        return ON_LINKS, "the model is not on the CPU"
    if num_hosts > 1 and not_late is not None:
        return ON_LINKS, f"ranks are on several hosts, and {not_late}"
    if num_hosts > 1:
        return BETWEEN_HOSTS, f"ranks are on several hosts; without a gain of 3 %, it waits as {ON_LINKS} does"
    if platform.machine() not in STRONG_MEMORY_ORDER:
        return ON_LINKS, f"shared memory is not proven on {platform.machine()}"
    return IN_MEMORY, "all ranks are on one host"
