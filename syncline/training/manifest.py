"""What a checkpoint says of itself, in its checkpoint.json: the step, the plan, and a digest of every rank's file.

A file that was damaged, exchanged or edited no longer has the digest that is noted here, and this file has one of its
own. Loads no torch: the launcher looks for checkpoints too.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from syncline.errors import PlanError, RunFolderError
from syncline.folders import Folder, LocalFolder
from syncline.forms import Section
from syncline.plan import Plan, parse_plan

NAME = "checkpoint.json"
_FOLDER = re.compile(r"step-([0-9]{8,18})")

LEARNS_THE_SAME = frozenset({
    "data_dir", "loaders", "link", "deadline_s", "max_restarts", "on_nan", "check_every", "log_every", "evaluate",
    "eval_per_rank", "test_samples", "measure", "inject", "profile", "checkpoint",
})  # fmt: skip
"""Keys of a plan that a user may change before a run goes on: the weights do not depend on them."""


class Manifest(Section):
    format: Literal[1] = 1
    step: int = Field(ge=1)
    plan: dict[str, Any]
    ranks: list[str]
    """The digest of each rank's file."""

    @property
    def digest(self) -> str:
        return digest(json.dumps(self.model_dump(), sort_keys=True).encode())

    def write(self, folder: Folder, name: str) -> None:
        content = json.dumps({**self.model_dump(), "digest": self.digest}, indent=1) + "\n"
        folder.write(f"{name}/{NAME}", content.encode())


def read_manifest(checkpoints: Folder, name: str) -> Manifest:
    """Raises RunFolderError for one that is missing or is not as it was written."""
    folder = checkpoints.path / name
    try:
        content = json.loads(checkpoints.read(f"{name}/{NAME}"))
        noted = content.pop("digest")
        manifest = Manifest.model_validate(content, strict=True)
    except FileNotFoundError:
        raise RunFolderError(f"{folder / NAME} is missing.") from None
    except OSError as error:
        raise RunFolderError(f"cannot read {folder / NAME}: {error.strerror}.") from None
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError, ValidationError):
        raise RunFolderError(f"{folder / NAME} is damaged.") from None
    if manifest.digest != noted or name != folder_name(manifest.step):
        raise RunFolderError(f"{folder / NAME} does not match its digest.")
    return manifest


def digest(content: bytes | memoryview) -> str:
    return hashlib.blake2b(content, digest_size=32).hexdigest()


def rank_file(folder: Path, rank: int) -> Path:
    return folder / rank_name(rank)


def rank_name(rank: int) -> str:
    return f"rank-{rank}.pt"


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def find_checkpoints(folder: Folder | Path) -> dict[int, str]:
    """Names of checkpoints by step, oldest first. What else lies there (a copy, step-00000020.bak) is not one."""
    there = LocalFolder(folder) if isinstance(folder, Path) else folder
    found = [match for name in there.names() if (match := _FOLDER.fullmatch(name)) and there.names(name)]
    return dict(sorted((int(match[1]), match[0]) for match in found))


def check_plan(manifest: Manifest, plan: Plan, folder: Path) -> None:
    """Raises RunFolderError where the plan would teach something else than the checkpoint's."""
    try:
        before, now = _flat(parse_plan(manifest.plan).model_dump()), _flat(plan.model_dump())
    except PlanError as error:
        raise RunFolderError(f"the plan in {folder / NAME} cannot be read: {error}") from None
    different = [
        f"{key} = {_said(now.get(key))}, not {_said(before.get(key))}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and key.partition(".")[0] not in LEARNS_THE_SAME
    ]
    if different:
        more = f" and {len(different) - 3} more" if len(different) > 3 else ""
        raise RunFolderError(
            f"{folder} is of another plan than this run's plan.toml, which has {'; '.join(different[:3])}{more}.",
            action="Put the plan back as it was, or start a new run with the new one.",
        )


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _said(value: Any) -> str:
    return "none" if value is None else json.dumps(value)
