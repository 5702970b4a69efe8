"""The methods that wait for backward to end and then average one gradient after the other.

The first rungs of the ladder: nothing is hidden behind backward, and every parameter pays the latency of a message.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from syncline.comm.communicator import Communicator
from syncline.errors import ContractError
from syncline.methods import Unused
from syncline.sync.base import Announced, GradientSync, in_backward, in_one_piece
from syncline.sync.sparse import average_sparse


class AfterBackward(GradientSync):
    """A subclass says how one gradient is averaged. Hooks only note the moment at which each became ready."""

    def __init__(self, communicator: Communicator, *, unused: Unused = "error") -> None:
        super().__init__(communicator)
        self.unused = unused
        self._parameters: list[tuple[str, nn.Parameter]] = []
        self._ready_ns: dict[str, int] = {}
        self._unused_before: frozenset[str] | None = None
        self._put_off: list[str] = []
        """Parameters without a gradient at the end of the last backward, for which the average was put off."""

    @abstractmethod
    def average(self, name: str, gradient: Tensor, ready_ns: int) -> None:
        """Replace one gradient by its mean over ranks, in place."""

    def attach(self, model: nn.Module) -> nn.Module:
        self._start(model)
        self._model, self._named = model, self._averaged(model)
        self._follow()
        return Announced(model, self)

    def forward_begins(self) -> None:
        if in_backward():
            return
        self._ready_ns.clear()  # of a backward that raised
        if self._put_off:
            self._raise_missing(self._put_off)
        if [parameter.requires_grad for _, parameter in self._named] != self._trained:
            self._follow()

    def finish(self) -> None:
        if not self._expects or not self._ready_ns:
            return
        self._compare_with_last_backward()
        with self.communicator.scope("gradients"):
            if self.unused == "zero":
                self._fill_in()
            elif missing := self._missing():
                self._raise_missing(missing)
            for name, parameter in self._parameters:
                if parameter.grad is not None:
                    self._average(name, parameter.grad, self._ready_ns.get(name, time.monotonic_ns()))
        self._ready_ns.clear()
        self._expects = False

    def backward_ended(self) -> None:
        """Puts the average off if gradients are missing: another output may be backpropagated next."""
        self._put_off = self._missing() if self.unused == "error" and self._ready_ns else []
        if not self._put_off:
            self.finish()

    def finish_without_gradients(self) -> None:
        for name, parameter in self._parameters:
            parameter.grad = torch.zeros_like(parameter)
            self._ready_ns[name] = time.monotonic_ns()
        self._expects = True
        self.finish()

    def detach(self) -> None:
        super().detach()
        self._ready_ns.clear()

    def _follow(self) -> None:
        """Parameters may be frozen and unfrozen between steps."""
        self._trained = [parameter.requires_grad for _, parameter in self._named]
        self._parameters = [(name, parameter) for name, parameter in self._named if parameter.requires_grad]
        self._watch([parameter for _, parameter in self._parameters], type(self)._mark)

    def _mark(self, number: int, _: Tensor) -> None:
        self._ready_ns[self._parameters[number][0]] = time.monotonic_ns()

    def _compare_with_last_backward(self) -> None:
        unused = frozenset(name for name, _ in self._parameters if name not in self._ready_ns)
        self.graph_is_static &= self._unused_before in (None, unused)
        self._unused_before = unused

    def _missing(self) -> list[str]:
        return [name for name, parameter in self._parameters if parameter.grad is None]

    def _raise_missing(self, names: list[str]) -> None:
        self._ready_ns.clear()
        self._put_off = []
        raise ContractError(
            f"parameter {names[0]} has no gradient: this rank's loss does not depend on it.",
            action='Freeze it (requires_grad = False), use it in every forward, or set unused="zero".',
            rank=self.communicator.rank,
        )

    def _fill_in(self) -> None:
        """Zeros where some other rank has a gradient. What no rank has a gradient for stays without."""
        own = torch.tensor([parameter.grad is not None for _, parameter in self._parameters], dtype=torch.uint8)
        by_rank = self.communicator.all_gather(own.to(self.communicator.device), label="unused parameters")
        for (_, parameter), used in zip(self._parameters, torch.stack(by_rank).any(0).tolist(), strict=True):
            if used and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _average(self, name: str, gradient: Tensor, ready_ns: int) -> None:
        self._look_at(name, gradient)
        if gradient.is_sparse:
            average_sparse(self.communicator, name, gradient)
            return
        dense = in_one_piece(gradient)
        self.average(name, dense, ready_ns)
        if dense is not gradient:
            gradient.copy_(dense)


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
