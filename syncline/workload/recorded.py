"""compute.json: what a step of one worker costs without synchronisation, layer by layer. Loads no torch.

A run with calibration steps writes it into its folder (see train/calibrate.py); `--compute replay:RUN` sleeps these
times while gradients of the right sizes really travel. For the ground truth and for teaching, times can be stated by
hand in a TOML file and used with `--compute sleep:FILE`:

    data_ms = 2
    update_ms = 10                  # shared out among the layers by the size of their parameters

    [[layers]]                      # in the order of forward; backward goes through them the other way
    name = "hidden"
    forward_ms = 20
    backward_ms = 40
    shapes = [[512, 512], [512]]    # of its parameters, whose gradients become ready when its backward ends
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from syncline.errors import PlanError
from syncline.files import read_regular
from syncline.forms import Form, Section, checked
from syncline.plan import Precision, compute_source

FORMAT = 2
"""2: each gradient has its part of the update."""
FILE_NAME = "compute.json"
ITEM_SIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "bool": 1, "uint8": 1}
_HOW = "Record one: `syncline train` without --compute writes it unless measure.calibration is 0."


class ForwardLayer(Section):
    """A leaf module, in the order in which forward calls them."""

    layer: str
    kind: str = ""
    seconds: float = Field(ge=0)


class Gradient(Section):
    """A parameter, in the order in which gradients become ready."""

    parameter: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    seconds: float = Field(ge=0)
    """Since the gradient before it was ready; for the first, since backward began."""
    update_s: float | None = Field(None, ge=0)
    """Its part of the update; absent where times were stated by hand or recorded before this was."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]


class Buffer(Section):
    """A buffer of the model: torch's DDP sends them in every forward."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"


class RankTimes(Section):
    """One rank's medians over the calibration steps."""

    rank: int
    data_s: float
    forward_s: float
    backward_s: float
    update_s: float


class ComputeTimes(Section):
    """Medians over calibration steps and then over ranks; `ranks` has each rank's own totals."""

    format: int = FORMAT
    model: str = ""
    samples: int | None = None
    """Per worker and step; absent where times were stated by hand."""
    num_train: int = 50_000
    workers: int = 1
    threads: int = 1
    precision: Precision = "float32"
    steps: int = 0
    """Calibration steps that were counted."""
    data_s: float = Field(0.0, ge=0)
    update_s: float = Field(0.0, ge=0)
    forward: tuple[ForwardLayer, ...]
    backward: tuple[Gradient, ...] = Field(min_length=1)
    backward_rest_s: float = Field(0.0, ge=0)
    """From the last gradient to the end of backward."""
    buffers: tuple[Buffer, ...] = ()
    ranks: tuple[RankTimes, ...] = ()

    @property
    def forward_s(self) -> float:
        return sum(layer.seconds for layer in self.forward)

    @property
    def backward_s(self) -> float:
        return sum(gradient.seconds for gradient in self.backward) + self.backward_rest_s

    @property
    def step_s(self) -> float:
        return self.data_s + self.forward_s + self.backward_s + self.update_s

    @property
    def gradient_bytes(self) -> int:
        return sum(gradient.num_bytes for gradient in self.backward)

    @property
    def updates_s(self) -> dict[str, float]:
        """By parameter; they add up to `update_s`. Where not all are known, it is shared out by size."""
        weights = [gradient.update_s for gradient in self.backward if gradient.update_s is not None]
        if len(weights) < len(self.backward) or not sum(weights):
            weights = [float(gradient.num_bytes) for gradient in self.backward]
        scale, names = self.update_s / sum(weights), [gradient.parameter for gradient in self.backward]
        return {name: weight * scale for name, weight in zip(names, weights, strict=True)}

    def to_json(self) -> str:
        """One line a layer, so that people can read it and change it."""
        values = self.model_dump(mode="json")
        lines = []
        for key, value in values.items():
            if isinstance(value, list):
                rows = ",\n".join(f"    {json.dumps(row)}" for row in value)
                lines.append(f'  "{key}": [\n{rows}\n  ]' if value else f'  "{key}": []')
            else:
                lines.append(f'  "{key}": {json.dumps(value)}')
        return "{\n" + ",\n".join(lines) + "\n}\n"


def load_times(compute: str) -> ComputeTimes:
    """What a plan's `compute` points to: `replay:` a run folder or a compute.json, or `sleep:` a file by hand."""
    kind, path = compute_source(compute)
    if kind == "sleep":
        return _stated(_read(path, tomllib.loads, "TOML"), path)
    if path.is_dir():
        path = path / FILE_NAME
        if not path.exists():
            raise PlanError(f"{path.parent} holds no recorded compute times ({FILE_NAME}).", action=_HOW)
    return _recorded(_read(path, json.loads, "JSON"), path)


def _read(path: Path, parse: Any, language: str) -> Mapping[str, Any]:
    try:
        values = parse(read_regular(path).decode())
    except OSError as error:
        raise PlanError(f"cannot read compute times from {path}: {error.strerror}.", action=_HOW) from error
    except (ValueError, RecursionError) as error:  # of both parsers, and of bytes that are not text
        raise PlanError(f"{path} is not valid {language}: {error}.") from error
    if not isinstance(values, Mapping):
        raise PlanError(f"{path} does not hold compute times.", action=_HOW)
    return values


def _recorded(values: Mapping[str, Any], path: Path) -> ComputeTimes:
    version = values.get("format", FORMAT)
    if not isinstance(version, int) or version > FORMAT:
        raise PlanError(f"{path} has format {version}, this version reads up to {FORMAT}.", action="Update Syncline.")
    return _valid({**values, "format": FORMAT}, path)


class _StatedLayer(Section):
    name: str
    forward_ms: float = Field(0.0, ge=0)
    backward_ms: float = Field(0.0, ge=0)
    shapes: tuple[tuple[int, ...], ...] = ()


class _Stated(Section):
    data_ms: float = Field(0.0, ge=0)
    update_ms: float = Field(0.0, ge=0)
    layers: tuple[_StatedLayer, ...] = Field(min_length=1)


def _stated(values: Mapping[str, Any], path: Path) -> ComputeTimes:
    """Layers without parameters delay the gradients of the layer that backward reaches next."""
    stated = _named(_Stated, values, path)
    gradients: list[dict[str, Any]] = []
    pending_s = 0.0
    for layer in reversed(stated.layers):
        pending_s += layer.backward_ms / 1e3
        for number, shape in reversed(list(enumerate(layer.shapes))):
            gradients.append({"parameter": f"{layer.name}.{number}", "shape": shape, "seconds": pending_s})
            pending_s = 0.0
    if not gradients:
        raise PlanError(f"{path}: no layer has shapes, so there is no gradient to send.")
    times = {
        "data_s": stated.data_ms / 1e3,
        "update_s": stated.update_ms / 1e3,
        "forward": [{"layer": layer.name, "seconds": layer.forward_ms / 1e3} for layer in stated.layers],
        "backward": gradients,
        "backward_rest_s": pending_s,
    }
    return _valid(times, path)


def _valid(values: Mapping[str, Any], path: Path) -> ComputeTimes:
    times = _named(ComputeTimes, values, path)
    names = [gradient.parameter for gradient in times.backward]
    tensors = [(gradient.shape, gradient.dtype) for gradient in times.backward]
    tensors += [(buffer.shape, buffer.dtype) for buffer in times.buffers]
    for shape, dtype in tensors:
        if dtype not in ITEM_SIZES:
            raise PlanError(f"{path}: unknown dtype {dtype!r}.", action=f"Choose one of {', '.join(ITEM_SIZES)}.")
        if min(shape, default=1) < 1:
            raise PlanError(f"{path}: a shape with {min(shape)} in it cannot be sent.")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise PlanError(f"{path}: {twice} appears twice.", action="Give each layer a name of its own.")
    return times


def _named(form: type[Form], values: Mapping[str, Any], path: Path) -> Form:
    try:
        return checked(form, values, "it")
    except PlanError as error:
        raise PlanError(f"{path}: {error.message}") from None
