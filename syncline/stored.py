"""The checked door to the files of a run folder: run.json, machine.json and summary.json, whoever wrote them.

What the code reads without a second look has the type that it needs, or RunFolderError names the file and the key.
Texts lose what would act on a terminal. Keys that are not listed here pass as they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from syncline.errors import RunFolderError
from syncline.files import read_regular
from syncline.units import printable

DAMAGED = "The run folder is damaged."

Count = Annotated[int, Field(ge=0, le=10**15)]
Workers = Annotated[int, Field(ge=1, le=10**6)]
Seconds = Annotated[float, Field(ge=0, le=1e12)]
Rate = Annotated[float, Field(gt=0, le=1e18)]
Share = Annotated[float, Field(ge=0, le=1e6)]


def _is_moment(text: str) -> str:
    datetime.fromisoformat(text)
    return text


class _Open(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


class Info(_Open):
    """run.json."""

    format: Annotated[int, Field(ge=1)]
    kind: Annotated[str, Field(pattern=r"^[a-z-]{1,30}$")]
    created: Annotated[str, AfterValidator(_is_moment)]
    status: Literal["running", "finished", "failed", "stopped"]
    folder: str = ""
    node: Count = 0


class Machine(_Open):
    """machine.json."""

    processor: str = ""
    cores: Workers = 1
    memory_bytes: Count = 0
    bf16: list[str] = []
    system: str = ""
    python: str = ""
    torch: str = ""
    syncline: str = ""


class _Timing(_Open):
    median_s: Seconds
    mean_s: Seconds
    spread_s: Seconds


class _LossLine(_Open):
    step: Count
    loss: float | None
    by_rank: list[float | None] = []


class _Own(_Open):
    """A rank's own figures."""

    loss: float | None
    accuracy: float | None = None


class _Epoch(_Open):
    epoch: Count = 0
    train_loss: float | None = None
    train_accuracy: float | None = None
    train_per_rank: list[_Own] = []
    test_loss: float | None = None
    test_accuracy: float | None = None
    test_per_rank: list[_Own] = []


class _Result(_Open):
    """What a training's summary and a comparison's row share."""

    label: str = ""
    method: str = ""
    model: str = ""
    compute: str = ""
    data: str = ""
    workers: Workers = 1
    threads: Workers | None = None
    seconds: list[Seconds] = []
    step: _Timing | None = None
    loss: float | None = None
    losses: list[_LossLine] | None = None
    epochs: list[_Epoch] = []
    train_samples: Count = 0
    other_load: Share | None = None
    point: dict[str, str | float | None] = {}


class _Compared(_Result):
    label: str
    seconds: Annotated[list[Seconds], Field(min_length=1)]


class _Point(_Open):
    bytes: Count
    median_s: Seconds
    bytes_per_s: Rate


class _Fit(_Open):
    alpha_s: Annotated[float, Field(ge=-1e12, le=1e12)]
    bytes_per_s: Rate | None


class _Probed(_Result):
    backend: str
    operation: str
    points: Annotated[list[_Point], Field(min_length=1)]
    fit: _Fit | None


class _Verdict(_Open):
    status: str
    ratio: float | None = None
    cause: str | None = None
    where: str | None = None


class _Certified(_Result):
    passed: bool
    sequential: _Verdict
    one_worker: _Verdict


class _Link(_Open):
    bytes_per_s: Rate


class Training(_Result):
    """summary.json, where its kind asks for nothing more."""

    hosts: Workers = 1
    global_batch: Workers = 1
    marks: list[str] = []
    link: str | dict[str, Any] | None = None
    links: dict[str, _Link | None] = {}


class _Comparison(Training):
    rows: list[_Compared]


class _Probe(Training):
    rows: list[_Probed]


class _Certificates(Training):
    rows: list[_Certified]


class _Rows(Training):
    rows: list[_Result]


SUMMARIES: dict[str, type[BaseModel]] = {
    "compare": _Comparison, "probe": _Probe, "verify": _Certificates, "function": _Rows,
}  # fmt: skip


def read_stored(path: Path, form: type[BaseModel]) -> dict[str, Any]:
    """The file's content, or RunFolderError."""
    try:
        content = json.loads(read_regular(path))
    except OSError as error:
        raise RunFolderError(f"cannot read {path}: {error.strerror}.", action=DAMAGED) from error
    except (ValueError, RecursionError) as error:
        raise RunFolderError(f"cannot read {path}: {printable(str(error))}.", action=DAMAGED) from error
    if not isinstance(content, dict):
        raise RunFolderError(f"{path} does not contain a JSON object.", action=DAMAGED)
    try:
        form.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = printable(".".join(map(str, first["loc"])))
        words = "is missing" if first["type"] == "missing" else first["msg"].removeprefix("Input ")
        raise RunFolderError(f"{path}: {key}: {words}.", action=DAMAGED) from None
    cleaned: dict[str, Any] = _cleaned(content)
    return cleaned


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {printable(key): _cleaned(inner) for key, inner in value.items()}
    return [_cleaned(inner) for inner in value] if isinstance(value, list) else value
