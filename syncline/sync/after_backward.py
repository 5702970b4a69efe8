"""The methods that wait for backward to end and then average one gradient after the other.

The first rungs of the ladder: nothing is hidden behind backward, and every parameter pays the latency of a message.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from syncline.comm.communicator import Communicator
from syncline.errors import ContractError
from syncline.sync.base import GradientSync, broadcast_state


class AfterBackward(GradientSync):
    """A subclass says how one gradient is averaged. Hooks only note the moment at which each became ready."""

    def __init__(self, communicator: Communicator) -> None:
        super().__init__(communicator)
        self._parameters: list[tuple[str, nn.Parameter]] = []
        self._ready_ns: dict[str, int] = {}

    @abstractmethod
    def average(self, name: str, gradient: Tensor, ready_ns: int) -> None:
        """Replace one gradient by its mean over ranks, in place."""

    def attach(self, model: nn.Module) -> nn.Module:
        broadcast_state(self.communicator, model)
        self._parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._hooks = [p.register_post_accumulate_grad_hook(self._mark(name)) for name, p in self._parameters]
        return model

    def finish(self) -> None:
        if self._paused or not self._ready_ns:
            return
        with self.communicator.scope("gradients"):
            for name, parameter in self._parameters:
                if parameter.grad is None:
                    raise ContractError(
                        f"parameter {name} has no gradient: this rank's loss does not depend on it.",
                        action="Freeze it (requires_grad = False) or use it in every forward.",
                        rank=self.communicator.rank,
                    )
                self.average(name, parameter.grad, self._ready_ns.get(name, time.monotonic_ns()))
        self._ready_ns.clear()

    def finish_without_gradients(self) -> None:
        for name, parameter in self._parameters:
            parameter.grad = torch.zeros_like(parameter)
            self._ready_ns[name] = time.monotonic_ns()
        self.finish()

    def detach(self) -> None:
        super().detach()
        self._ready_ns.clear()

    def _mark(self, name: str) -> Callable[[Tensor], None]:
        def mark(_: Tensor) -> None:
            self._ready_ns[name] = time.monotonic_ns()

        return mark


class AllReduce(AfterBackward):
    """all-reduce: no root, so each rank sends 2(n-1)/n of the bytes."""

    def average(self, name: str, gradient: Tensor, ready_ns: int) -> None:
        self.communicator.all_reduce(gradient, label=name, ready_ns=ready_ns)
        start_ns = time.monotonic_ns()
        gradient.div_(self.communicator.world_size)
        self.log.pack(name, start_ns)


class GatherScatter(AfterBackward):
    """gather-scatter: rank 0 gathers each gradient from all ranks, averages, and scatters the mean back.

    Everything passes through rank 0's link: 2(n-1) times the gradient's bytes, so it gets slower with every rank.
    """

    def average(self, name: str, gradient: Tensor, ready_ns: int) -> None:
        comm = self.communicator
        parts = [torch.empty_like(gradient) for _ in range(comm.world_size)] if comm.rank == 0 else None
        comm.gather(gradient, parts, label=name, ready_ns=ready_ns)
        means = None if parts is None else self._means(name, parts)
        comm.scatter(gradient, means, label=name)

    def _means(self, name: str, parts: list[Tensor]) -> list[Tensor]:
        start_ns = time.monotonic_ns()
        means = [mean_in_rank_order(parts)] * self.communicator.world_size
        self.log.pack(name, start_ns)
        return means


class PointToPoint(AfterBackward):
    """point-to-point: the exchange with rank 0 written as sends and receives.

    The same bytes as gather-scatter over the same link, but rank 0's receives are posted together, and so are its
    sends.
    """

    def average(self, name: str, gradient: Tensor, ready_ns: int) -> None:
        if self.communicator.rank == 0:
            self._average_on_root(name, gradient, ready_ns)
        else:
            self.communicator.send(gradient, 0, label=name, ready_ns=ready_ns).wait()
            self.communicator.receive(gradient, 0, label=name).wait()

    def _average_on_root(self, name: str, gradient: Tensor, ready_ns: int) -> None:
        comm = self.communicator
        others = range(1, comm.world_size)
        parts = [torch.empty_like(gradient) for _ in others]
        for work in [comm.receive(part, rank, label=name) for part, rank in zip(parts, others, strict=True)]:
            work.wait()
        start_ns = time.monotonic_ns()
        gradient.copy_(mean_in_rank_order([gradient, *parts]))
        self.log.pack(name, start_ns)
        for work in [comm.send(gradient, rank, label=name, ready_ns=ready_ns) for rank in others]:
            work.wait()


def mean_in_rank_order(parts: Sequence[Tensor]) -> Tensor:
    """The order of summation that the sequential reference uses too."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total.div_(len(parts))
