"""Programs beside a report: each part of a lab as the smallest stand-alone torch.distributed program, made from the
templates in the lab's scripts/ with the settings of its own run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from string import Template
from typing import Any

from syncline.plan import Plan, load_plan
from syncline.study.lab_code import LABS

SUFFIX = ".template"
SHARED = LABS / f"model_and_data.py{SUFFIX}"
KEYS = (
    "model", "data", "data_dir", "image_size", "num_classes", "sequence_length", "recipe", "seed", "threads",
    "global_batch", "steps", "epochs", "log_every", "channels_last",
)  # fmt: skip


def write_programs(lab: Path, plan: Plan, folder: Path) -> list[str]:
    """Fill the lab's templates with the plan's settings. Returns the programs' names; none without templates."""
    templates = sorted((lab / "scripts").glob(f"*.py{SUFFIX}"))
    shutil.rmtree(folder, ignore_errors=True)
    if not templates:
        return []
    folder.mkdir(parents=True)
    filled = {"settings": _written(settings_of(plan)), "workers": str(plan.workers)}
    for template in (SHARED, *templates):
        (folder / template.name.removesuffix(SUFFIX)).write_text(Template(template.read_text()).substitute(filled))
    return [template.name.removesuffix(SUFFIX) for template in templates]


def settings_of(plan: Plan) -> dict[str, Any]:
    """What decides a plan's losses, where it is not the default; rates and the like where its recipe has others."""
    given = plan.model_dump(mode="json")
    usual = Plan.model_validate({"steps": 1}).model_dump(mode="json")
    always = ("model", "data", "recipe", "seed", "threads", "global_batch", "steps", "log_every")
    kept = {key: given[key] for key in KEYS if given[key] is not None and (key in always or given[key] != usual[key])}
    own = load_plan(None, kept).optimizer.model_dump(mode="json")
    chosen = given["optimizer"]
    return kept | {f"optimizer.{key}": chosen[key] for key in chosen if chosen[key] != own[key]}


def _written(settings: dict[str, Any]) -> str:
    texts = {key: json.dumps(value) if isinstance(value, str) else repr(value) for key, value in settings.items()}
    lines = [f"        {json.dumps(key)}: {text}," for key, text in texts.items()]
    return "\n".join(["{", *lines, "    }"])
