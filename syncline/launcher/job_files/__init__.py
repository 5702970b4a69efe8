"""Job files: the same run of `syncline train --nodes` as a file for Slurm, Kubernetes, Kubeflow or SkyPilot.

Each kind is one template beside this file. The scheduler starts one command on each node and says which node it is;
all the rest is what nodes do that were started by hand.
"""

from __future__ import annotations

import json
import re
import secrets
import shlex
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import jinja2

from syncline.errors import PlanError, UsageError
from syncline.files import read_regular
from syncline.forms import unknown_value
from syncline.plan import Plan, load_plan

TEMPLATES = {
    "slurm": "slurm.sh.jinja",
    "kubernetes": "kubernetes.yaml.jinja",
    "kubeflow": "kubeflow.yaml.jinja",
    "skypilot": "skypilot.yaml.jinja",
}
VOLUME_KINDS = ("kubernetes", "kubeflow")
IMAGE_KINDS = ("kubernetes", "kubeflow", "skypilot")
_NAME = r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?"
_IMAGE = r"[A-Za-z0-9][\w./:@-]*"
_MOST_HOURS = 24 * 365


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a job file says beside its plan. None takes the default that `job_file` names."""

    nodes: int = 2
    workers_per_host: int | None = None
    cpus: int | None = None
    """Cores of each node; default one for each compute thread of its ranks."""
    hours: float = 24.0
    name: str = "syncline"
    image: str | None = None
    volume: str | None = None
    """A claim that all nodes can write to, for run folders."""
    token: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    """The run's secret, in files of a kind that has a place for it."""


def default_image() -> str:
    return f"syncline:{metadata.version('syncline')}"


def job_file(kind: str, plan_path: Path, job: Job) -> str:
    """The file's text. The same each time but for the token. What is wrong with plan or job is a UsageError."""
    if kind not in TEMPLATES:
        raise UsageError(f"no job file of this kind: {unknown_value(kind, TEMPLATES)}")
    _check(kind, job)
    workers = None if job.workers_per_host is None else job.nodes * job.workers_per_host
    plan = load_plan(plan_path, {"hosts": job.nodes, "workers": workers})
    if plan.link is not None:
        raise PlanError("the plan's link applies only to emulated hosts.", action="Remove it for a job file.")
    return _environment().get_template(TEMPLATES[kind]).render(**_values(plan, plan_path, job))


def _values(plan: Plan, path: Path, job: Job) -> dict[str, Any]:
    """What templates can use."""
    ranks = plan.workers // job.nodes
    cpus = job.cpus or ranks * (plan.threads or 1)
    text = _text(path)
    return {
        "job": job,
        "name": job.name,
        "cpus": cpus,
        "seconds": round(job.hours * 3600),
        "restarts": plan.max_restarts,
        "image": job.image or default_image(),
        "plan_path": shlex.quote(str(path)),
        "plan_text": text,
        "ending": _line_not_in(text),
        "flags": f"--workers-per-host {ranks} --threads {plan.threads or max(1, cpus // ranks)}",
    }


def _check(kind: str, job: Job) -> None:
    for flag, number in (("--nodes", job.nodes), ("--workers-per-host", job.workers_per_host), ("--cpus", job.cpus)):
        if number is not None and number < 1:
            raise UsageError(f"{flag} {number} is too few.", action="Ask for at least one.")
    if not 1 / 60 <= job.hours <= _MOST_HOURS:
        raise UsageError(f"--hours {job.hours:g} is not a time limit.", action=f"Give 1/60 to {_MOST_HOURS} hours.")
    for flag, value, kinds in (("--image", job.image, IMAGE_KINDS), ("--volume", job.volume, VOLUME_KINDS)):
        if value is not None and kind not in kinds:
            raise UsageError(f"{flag} is not for {kind}, but for {', '.join(kinds)}.")
    for flag, value in (("--name", job.name), ("--volume", job.volume)):
        if value is not None and not re.fullmatch(_NAME, value):
            raise UsageError(
                f"{flag} {value!r} is not a name.",
                action="Use at most 40 small letters, digits and hyphens, a letter first and no hyphen last.",
            )
    if job.image is not None and not re.fullmatch(_IMAGE, job.image):
        raise UsageError(f"--image {job.image!r} is no image.", action="Write it as registry/name:tag.")


def _text(path: Path) -> str:
    """The plan as the user wrote it, comments and all. It has been read as TOML before, so it is UTF-8."""
    return read_regular(path).decode().replace("\r\n", "\n").rstrip("\n") + "\n"


def _line_not_in(text: str) -> str:
    """A line that ends a shell's here-document."""
    line = "END_OF_PLAN"
    while line in text:
        line += "_"
    return line


def _environment() -> jinja2.Environment:
    loader = jinja2.PackageLoader("syncline", "launcher/job_files")
    environment = jinja2.Environment(
        loader=loader, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined, autoescape=False,
    )  # fmt: skip
    environment.filters["block"] = _block
    environment.filters["clock"] = _clock
    return environment


def _block(text: str, indent: int) -> str:
    """A text as a YAML value: its own lines, or a JSON string where YAML would not read those as they are."""
    plain = all(letter.isprintable() or letter in "\n\t" for letter in text) and not text[:1].isspace()
    if not text or not plain:
        return json.dumps(text)
    lines = [" " * indent + line if line else "" for line in text.rstrip("\n").split("\n")]
    return "\n".join(["|", *lines])


def _clock(seconds: int) -> str:
    """90 minutes -> 1:30:00."""
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
