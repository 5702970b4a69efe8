"""tree-aggregate: one training step as a Spark job, as a lesson in why nobody trains like that.

This process is the driver. In each step it broadcasts weights and buffers; each worker's share of the batch is a
partition, whose task computes the share's gradients; and Spark's `treeAggregate` sums them up, the last sums in the
driver, which alone has an optimiser:

    driver   weights -> broadcast              sum of the last stage -> mean -> update
    tasks              -> forward, backward -> shuffle -> partial sums ->

PySpark's tree has a level of partial sums only where that saves the driver work: with depth 2, 4 partitions and fewer
all send to the driver, 8 make 2 partial sums and 16 make 4.

Tasks keep nothing from step to step but the model's skeleton and the data, so every partition's batch norm starts
from the driver's buffers, and the driver takes partition 0's, as DDP takes rank 0's.
"""

from __future__ import annotations

import pickle
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from syncline.comm.communicator import Communicator
from syncline.errors import CommunicationError, PlanError
from syncline.launcher.wire import pack, unpack
from syncline.machine import cores
from syncline.spans import EventLog
from syncline.sync.base import GradientSync
from syncline.sync.spark_jobs import Counted, check_installed, spark_jobs
from syncline.workload.sharding import Shard, part_of

Array = npt.NDArray[Any]
ShardStep = Callable[[nn.Module, Shard, int, int, EventLog], Any]
"""Forward and backward of a shard, whose gradients it leaves in the model: of model, shard, partition, step and log.
It must pickle, and so must what it returns."""
COMPUTING = ("backward", "forward", "data", "score")
"""Where tasks do several of these at once, the first counts."""
DEPTH = 2
"""PySpark's own default."""


@dataclass
class Sum:
    """What one task found, or several together."""

    gradients: list[Array | None] = field(default_factory=list)
    results: dict[int, Any] = field(default_factory=dict)
    """By partition."""
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    """What tasks did, from when to when on this machine's clock."""
    buffers: list[Array] = field(default_factory=list)
    """Of partition 0."""
    failed: tuple[int, str, str] | None = None
    """Partition, error and traceback of a task that raised."""

    def __add__(self, other: Sum) -> Sum:
        """Into this one's memory, which nobody else holds."""
        failed = self.failed or other.failed
        if failed:
            return Sum(failed=failed)
        pairs = zip(self.gradients, other.gradients, strict=True)
        return Sum(
            [_added(mine, theirs) for mine, theirs in pairs],
            {**self.results, **other.results},
            [*self.spans, *other.spans],
            self.buffers or other.buffers,
        )


class TreeAggregate(GradientSync):
    sees_gradients = False
    stands_alone = True

    def __init__(
        self, communicator: Communicator, *, partitions: int = 2, seed: int = 0, depth: int = DEPTH,
        broadcast_buffers: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(communicator)
        if not broadcast_buffers:
            raise PlanError(
                "method tree-aggregate keeps partition 0's batch-norm statistics: its tasks keep none of their own.",
                action="Leave batch_norm out, or choose another method.",
            )
        check_installed("tree-aggregate")
        self.seed = seed
        """Of what models draw in a task."""
        self._num_partitions = partitions
        self._depth = depth
        self._skeleton: Any = None

    def attach(self, model: nn.Module) -> nn.Module:
        """Starts Spark, where this process has none yet."""
        self._model = model
        spark_jobs(cores() // torch.get_num_threads() or 1)
        return model

    def finish(self) -> None:
        """The job has put the mean into every .grad."""

    def finish_without_gradients(self) -> None:
        pass

    def compute(self, shard_step: ShardStep, shard: Shard) -> list[Any]:
        """The step's job: afterwards every .grad is the mean over the shard's samples. Returns what `shard_step`
        returned, by partition."""
        assert self._model is not None, "attach a model first"
        start_ns, spark = time.monotonic_ns(), spark_jobs(cores())
        if self._skeleton is None:  # not in attach: layers may still be switched off after it
            self._skeleton, _ = spark.share(_packed(self._model, shard_step))
        state, state_bytes = spark.share([_array(tensor) for tensor in _state(self._model)])
        shared_ns = time.monotonic_ns()
        count, step = self._num_partitions, self.log.step
        task = Task(self._skeleton, state, step, torch.get_num_threads())
        total, counted = spark.tree_aggregate(
            list(enumerate(parts_of(shard, count))), task, combined,
            depth=self._depth, deadline_s=self.communicator.deadline_s, name=f"the Spark job of step {step}",
        )  # fmt: skip
        summed_ns = time.monotonic_ns()
        if total.failed:
            number, error, trace = total.failed
            raised = CommunicationError(f"partition {number} of the Spark job raised {error}", step=step)
            raised.add_note(trace)
            raise raised
        self._take(total)
        state.destroy()
        self._write(total, counted, state_bytes, (start_ns, shared_ns, summed_ns))
        return [total.results[number] for number in range(count)]

    def detach(self) -> None:
        super().detach()
        if self._skeleton is not None:
            self._skeleton.destroy()
        self._skeleton = self._model = None

    def _take(self, total: Sum) -> None:
        """The mean, and the buffers that stay."""
        assert self._model is not None
        for parameter, gradient in zip(_trained(self._model), total.gradients, strict=True):
            parameter.grad = None if gradient is None else torch.from_numpy(gradient).div_(self._num_partitions)
        for buffer, value in zip(self._model.buffers(), total.buffers, strict=True):
            buffer.copy_(torch.from_numpy(value))

    def _write(self, total: Sum, counted: Counted, state_bytes: int, times: tuple[int, int, int]) -> None:
        """The job into the log: what tasks computed as phases of the step, the rest as what sending cost. No
        transfer lies behind compute, because the driver has nothing else to do."""
        start_ns, shared_ns, summed_ns = times
        phases, pauses = timeline(total.spans, shared_ns)
        last = phases[-1][2] if phases else shared_ns
        add = self.log.add
        for label, begin, end in [("weights", start_ns, shared_ns), *(("spark", *pause) for pause in pauses)]:
            add("phase", name="stall", label=label, start=begin, end=end)
        for name, begin, end in phases:
            add("phase", name=name, start=begin, end=end)
        size = sum(gradient.nbytes for gradient in total.gradients if gradient is not None)
        about: dict[str, Any] = {"name": "tree_aggregate", "label": "gradients", "bytes": size}
        add("collective", **about, ready=last, start=last, end=summed_ns)
        add("phase", name="sync", start=last, end=time.monotonic_ns())
        add(
            "job", partitions=self._num_partitions, tasks=counted.tasks, stages=counted.stages,
            broadcast_bytes=state_bytes, result_bytes=counted.result_bytes, shuffle_bytes=counted.shuffle_bytes,
        )  # fmt: skip


@dataclass(frozen=True)
class Task:
    """What runs in each partition, in a process of Spark's."""

    skeleton: Any
    state: Any
    step: int
    threads: int

    def __call__(self, _: None, item: tuple[int, Shard]) -> Sum:
        """Never raises: the error comes back with its partition, instead of in a JVM's words."""
        number, shard = item
        try:
            return self._computed(number, shard)
        except Exception as error:
            return Sum(failed=(number, f"{type(error).__name__}: {error}", traceback.format_exc()))

    def _computed(self, number: int, shard: Shard) -> Sum:
        torch.set_num_threads(self.threads)
        model, shard_step = _unpacked(self.skeleton.value)
        with torch.no_grad():
            for tensor, value in zip(_state(model), self.state.value, strict=True):
                tensor.copy_(torch.from_numpy(value))
        model.zero_grad(set_to_none=True)
        log = EventLog()
        result = shard_step(model, shard, number, self.step, log)
        spans = [(r["name"], r["start"], r["end"]) for r in log.records if r.get("name") in COMPUTING]
        gradients = [None if p.grad is None else _array(p.grad) for p in _trained(model)]
        return Sum(gradients, {number: result}, spans, [] if number else [_array(b) for b in model.buffers()])


def parts_of(shard: Shard, count: int) -> list[Shard]:
    """The shares that as many ranks would take."""
    size = len(shard.indices)
    return [
        replace(shard, indices=shard.indices[part_of(size, number, count)], world_size=count)
        for number in range(count)
    ]


def combined(one: Sum | None, other: Sum | None) -> Sum | None:
    """Spark begins every sum with nothing."""
    return one + other if one is not None and other is not None else one or other


def timeline(
    spans: Sequence[tuple[str, int, int]], start_ns: int
) -> tuple[list[tuple[str, int, int]], list[tuple[int, int]]]:
    """What tasks did as stretches of time that do not overlap, and the pauses between them, from `start_ns` on."""
    cuts = sorted({start_ns, *(time for _, *ends in spans for time in ends if time > start_ns)})
    phases: list[tuple[str, int, int]] = []
    pauses: list[tuple[int, int]] = []
    for begin, end in pairwise(cuts):
        busy = {name for name, first, last in spans if first <= begin and end <= last}
        doing = next((name for name in COMPUTING if name in busy), None)
        if doing is None:
            pauses.append((begin, end))
        elif phases and phases[-1][0] == doing and phases[-1][2] == begin:
            phases[-1] = (doing, phases[-1][1], end)
        else:
            phases.append((doing, begin, end))
    return phases, pauses


_models: dict[int, Any] = {}
"""In a task's process: what it unpacked, by the pickle's identity, which the broadcast keeps."""


def _unpacked(packed: bytes) -> Any:
    if id(packed) not in _models:
        _models.clear()
        _models[id(packed)] = (packed, unpack(packed))
    return _models[id(packed)][1]


def _packed(model: nn.Module, shard_step: ShardStep) -> bytes:
    try:
        return pack((model, shard_step))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise PlanError(
            f"the model or the data cannot be sent to Spark's tasks: {error}.", action="Choose another method."
        ) from error


def _state(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _array(tensor: Tensor) -> Array:
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    array: Array = dense.contiguous().numpy()
    return array


def _added(one: Array | None, other: Array | None) -> Array | None:
    if one is None or other is None:
        return other if one is None else one
    return np.add(one, other, out=one)
