"""Calibration: a few steps without synchronisation, before the run. What does compute cost when nothing is sent?

All ranks compute at once, as they will in the run, each on a model of its own that no method is attached to and that
is thrown away afterwards: the model that is trained is not touched, so a run is the same to the bit with and without.
Only here is every layer timed; real steps pay nothing for it. After each update the same is done once more layer by
layer, at rate 0 and beside the clock of the step: what part of the update each layer has.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from syncline.comm.communicator import Communicator
from syncline.spans import EventLog, Record
from syncline.training.layer_updates import parameters_by_layer, timed_updates
from syncline.training.step import Worker, train_step
from syncline.workload.data.loading import announced
from syncline.workload.recorded import ComputeTimes
from syncline.workload.sharding import Shard, Sharding

LONGEST_S = 10.0
"""No further step is begun after this time, so that a slow model is not held up by the default."""
PHASES = ("data", "forward", "backward", "rest", "update")
REST = "(between layers, and the loss)"


@dataclass(frozen=True)
class StepTimes:
    """One calibration step of one rank, in seconds. `ready` counts from the beginning of backward."""

    phases: dict[str, float]
    """`backward` ends when the last gradient is ready; what follows is `rest`."""
    layers: dict[str, float]
    """By leaf module, in the order of the first call."""
    ready: dict[str, float]
    """By parameter."""
    updates: dict[str, float]
    """By parameter, applied layer by layer."""


def calibrate(worker: Worker, sharding: Sharding, num_steps: int, communicator: Communicator) -> list[StepTimes]:
    """This rank's steps, the first one cut; written to the log as records of kind `calibration`. Collective."""
    log, started = worker.log, time.monotonic()
    aside = replace(worker, log=EventLog(rank=log.rank))
    steps: list[StepTimes] = []
    with torch.random.fork_rng(), _watching(worker.model, worker.optimizer) as watch:
        for shard in announced(worker.batches, first_shards(sharding, num_steps + 1)):
            if _someone_is_late(communicator, steps, started):
                break
            watch.clear()
            aside.log.records.clear()
            train_step(aside, shard)
            steps.append(_step_times(aside.log.records, watch))
    counted = steps[1:] or steps
    for turn, step in enumerate(counted):
        log.add("calibration", turn=turn, **{name: round(step.phases[name] * 1e9) for name in PHASES})
    return counted


def first_shards(sharding: Sharding, count: int) -> Iterator[Shard]:
    """Shards of whole batches, from as many epochs as it takes; of a data set smaller than a batch, what there is."""
    whole = sharding.batch_size(0)
    shards = chain.from_iterable(sharding.epoch(epoch) for epoch in itertools.count())
    return islice((shard for shard in shards if shard.num_global == whole), count)


def _someone_is_late(communicator: Communicator, steps: list[StepTimes], started: float) -> bool:
    """Ranks also meet here: all of them compute at once."""
    late = bool(steps) and time.monotonic() - started > LONGEST_S
    flag = torch.tensor([float(late)], device=communicator.device)
    with communicator.scope("calibration"):
        communicator.all_reduce(flag, label="calibration")
    return bool(flag.item())


class _Watch:
    """Stamps of one step."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []
        self.ready: dict[str, int] = {}
        self.updates: dict[str, float] = {}
        self.updates_ns = 0
        """How long the updates layer by layer took in all."""
        self._entered: dict[str, int] = {}

    def clear(self) -> None:
        self.calls.clear()
        self.ready.clear()

    def enter(self, name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any) -> None:
            self._entered[name] = time.monotonic_ns()

        return hook

    def leave(self, name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any, _outputs: Any) -> None:
            self.calls.append((name, self._entered[name], time.monotonic_ns()))

        return hook

    def mark(self, name: str) -> Callable[..., None]:
        def hook(_parameter: torch.Tensor) -> None:
            self.ready[name] = time.monotonic_ns()

        return hook

    def update_again(self, layers: Sequence[Mapping[str, nn.Parameter]]) -> Callable[..., None]:
        def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            start_ns = time.monotonic_ns()
            self.updates = timed_updates(optimizer, layers)
            self.updates_ns = time.monotonic_ns() - start_ns

        return hook


@contextmanager
def _watching(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[_Watch]:
    watch, hooks = _Watch(), list[RemovableHandle]()
    hooks.append(optimizer.register_step_post_hook(watch.update_again(parameters_by_layer(model))))
    for name, module in model.named_modules():
        if not list(module.children()):
            hooks.append(module.register_forward_pre_hook(watch.enter(name)))
            hooks.append(module.register_forward_hook(watch.leave(name)))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            hooks.append(parameter.register_post_accumulate_grad_hook(watch.mark(name)))
    try:
        yield watch
    finally:
        for hook in hooks:
            hook.remove()


def _step_times(records: Sequence[Record], watch: _Watch) -> StepTimes:
    spans = {record["name"]: (record["start"], record["end"]) for record in records if record["kind"] == "phase"}
    phases = {name: (spans[name][1] - spans[name][0]) / 1e9 for name in ("data", "forward", "update")}
    if "score" in spans:  # read from forward's result, and counted there
        phases["forward"] += (spans["score"][1] - spans["score"][0]) / 1e9
    phases["update"] -= watch.updates_ns / 1e9
    start, end = spans["backward"]
    last = max(watch.ready.values(), default=end)
    phases |= {"backward": (last - start) / 1e9, "rest": (end - last) / 1e9}
    layers: dict[str, float] = {}
    for name, entered, left in watch.calls:
        if left <= spans["forward"][1]:  # checkpointing calls layers again in backward
            layers[name] = layers.get(name, 0.0) + (left - entered) / 1e9
    ready = {name: (moment - start) / 1e9 for name, moment in watch.ready.items()}
    return StepTimes(phases, layers, ready, watch.updates)


def gather_times(
    steps: Sequence[StepTimes], model: nn.Module, communicator: Communicator, about: dict[str, Any]
) -> ComputeTimes:
    """Every rank's medians together: what compute.json holds. The order of layers is rank 0's. Collective."""
    layers = [name for name, module in model.named_modules() if not list(module.children())]
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    own = [median_of([step.phases.get(name) for step in steps]) for name in PHASES]
    own += [median_of([step.layers.get(name) for step in steps]) for name in layers]
    own += [median_of([step.ready.get(name) for step in steps]) for name in trained]
    own += [median_of([step.updates.get(name) for step in steps]) for name in trained]
    with communicator.scope("calibration times"):
        sent = torch.tensor(own, dtype=torch.float64, device=communicator.device)
        by_rank = [part.tolist() for part in communicator.all_gather(sent, label="calibration times")]
    called = [name for name in steps[0].layers if name in layers]
    about = {"workers": communicator.world_size, "steps": len(steps), **about}
    return compute_times(model, layers, trained, called, by_rank, about)


def median_of(values: Sequence[float | None]) -> float:
    """NaN where a layer was never called or a parameter has no gradient."""
    numbers = [value for value in values if value is not None and not math.isnan(value)]
    return statistics.median(numbers) if numbers else math.nan


def compute_times(
    model: nn.Module,
    layers: Sequence[str],
    trained: Sequence[str],
    called: Sequence[str],
    by_rank: Sequence[Sequence[float]],
    about: dict[str, Any],
) -> ComputeTimes:
    """Medians over ranks. Pure: each rank's row holds the phases, then the layers, then the moments of readiness and
    the updates of the trained parameters."""
    middle = [median_of(column) for column in zip(*by_rank, strict=True)]
    phases = dict(zip(PHASES, middle, strict=False))
    first, second = len(PHASES), len(PHASES) + len(layers)
    third = second + len(trained)
    of_layer = dict(zip(layers, middle[first:second], strict=True))
    moments = {name: at for name, at in zip(trained, middle[second:third], strict=True) if not math.isnan(at)}
    updates = dict(zip(trained, middle[third:], strict=True))
    whole = sum(updates[name] for name in moments)
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    forward = [
        {"layer": name, "kind": type(modules[name]).__name__, "seconds": _ns(of_layer[name])} for name in called
    ]
    between = phases["forward"] - sum(of_layer[name] for name in called)
    forward.append({"layer": REST, "seconds": _ns(max(0.0, between))})
    backward, before = [], 0.0
    for name in sorted(moments, key=lambda name: moments[name]):
        tensor = {"shape": list(parameters[name].shape), "dtype": _dtype(parameters[name])}
        update = {} if math.isnan(whole) else {"update_s": _ns(phases["update"] * updates[name] / whole)}
        backward.append({"parameter": name, **tensor, "seconds": _ns(moments[name] - before), **update})
        before = moments[name]
    buffers = [{"name": key, "shape": list(own.shape), "dtype": _dtype(own)} for key, own in model.named_buffers()]
    return ComputeTimes.model_validate(
        {
            **about,
            "data_s": _ns(phases["data"]),
            "update_s": _ns(phases["update"]),
            "forward": forward,
            "backward": backward,
            "backward_rest_s": _ns(phases["rest"]),
            "buffers": buffers,
            "ranks": [_totals(rank, row) for rank, row in enumerate(by_rank)],
        }
    )


def _totals(rank: int, row: Sequence[float]) -> dict[str, float]:
    data, forward, backward, rest, update = (_ns(seconds) for seconds in row[: len(PHASES)])
    return {
        "rank": rank,
        "data_s": data,
        "forward_s": forward,
        "backward_s": _ns(backward + rest),
        "update_s": update,
    }


def _ns(seconds: float) -> float:
    """No digits that the clock does not have."""
    return round(seconds, 9)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
