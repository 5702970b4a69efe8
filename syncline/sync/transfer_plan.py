"""What method ahead measures and agrees on with other ranks: the times of a step, the link's rate, one order."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from syncline.comm.communicator import Communicator
from syncline.methods import Order
from syncline.predict.transfers import (
    Chunk,
    Link,
    Prediction,
    next_use_first,
    predict_ahead,
    predict_barrier,
    ready_first,
)

PROBE_BYTES = (16_384, 2_097_152)
PROBE_REPEATS = 5


class StepTimes:
    """When chunks were ready and needed, on a clock that stands still while forward or a barrier waits for
    transfers: what compute alone would take."""

    def __init__(self) -> None:
        self.stalled_ns = 0
        self.called: dict[nn.Module, int] = {}
        """When each module was first called in this forward."""
        self.records: list[list[float]] = []
        """As `plan_transfers` takes them, one for each step."""
        self._backward_ns = self._forward_ns = self._stalled_before_ns = 0

    def forward_begins(self) -> None:
        self.called = {}
        self._forward_ns = self._now()

    def calls(self, module: nn.Module) -> None:
        self.called.setdefault(module, self._now())

    def backward_begins(self) -> None:
        self._backward_ns, self._stalled_before_ns = self._now(), self.stalled_ns

    def record(
        self,
        places: Mapping[nn.Module, Sequence[int]],
        chunks_of: Sequence[Sequence[int]],
        flag_chunks: Sequence[int],
        ready_ns: Mapping[int, int],
    ) -> None:
        """The step whose next forward has just ended: where its parameters are waited for, which chunks they are in,
        and when each was ready. Chunks with flags are due when forward begins."""
        now_ns = self._now()
        count = 1 + max((chunk for chunks in (*chunks_of, flag_chunks) for chunk in chunks), default=-1)
        ready, due = [0] * count, [now_ns] * count
        uses: dict[int, list[int]] = {}
        for place, own in places.items():
            for number in own:
                uses.setdefault(number, [now_ns]).append(self.called.get(place, now_ns))
        for number, chunks in enumerate(chunks_of):
            for chunk in chunks:
                ready[chunk] = max(ready[chunk], ready_ns.get(number, 0) - self._stalled_before_ns)
                due[chunk] = min(due[chunk], *uses.get(number, [now_ns]))
        for chunk in flag_chunks:
            ready[chunk], due[chunk] = max(ready_ns.values()) - self._stalled_before_ns, self._forward_ns
        times = [*ready, *due, self._forward_ns, now_ns]
        self.records.append([max(0.0, (at_ns - self._backward_ns) / 1e9) for at_ns in times])

    def _now(self) -> int:
        return time.monotonic_ns() - self.stalled_ns


def measure_link(channel: Communicator, communicator: Communicator) -> Link:
    """From all-reduces of two sizes on the channel that gradients use, as rank 0 sees them. Collective."""
    medians = [_all_reduce_s(channel, num_bytes) for num_bytes in PROBE_BYTES]
    agreed = torch.tensor(medians, dtype=torch.float64, device=communicator.device)
    with communicator.scope("probe"):
        communicator.broadcast(agreed, label="probe")
    small, large = agreed.tolist()
    beta = max((large - small) / (PROBE_BYTES[1] - PROBE_BYTES[0]), 1e-12)
    return Link(max(small - beta * PROBE_BYTES[0], 0.0), beta)


def _all_reduce_s(channel: Communicator, num_bytes: int) -> float:
    values = torch.zeros(num_bytes // 4, device=channel.device)
    seconds = []
    with channel.scope(f"probe {num_bytes}"):
        for _ in range(PROBE_REPEATS):
            start_ns = time.monotonic_ns()
            channel.all_reduce(values, label="probe")
            seconds.append((time.monotonic_ns() - start_ns) / 1e9)
    return statistics.median(seconds)


def plan_transfers(
    communicator: Communicator, own: Tensor, sizes: Sequence[int], link: Link, order: Order
) -> tuple[Prediction, Prediction]:
    """What to expect in this order, and with a barrier. Collective.

    `own` has, in seconds of compute since backward began, when each chunk was ready and when it was needed, then the
    end of backward and of the next forward. A chunk is ready when it is on the last rank; the slowest rank's forward
    says when it is due. All ranks compute the same list from the same figures.
    """
    with communicator.scope("transfer plan"):
        parts = communicator.all_gather(own.to(communicator.device), label="transfer plan")
    rows = torch.stack([part.cpu() for part in parts])
    slowest = rows[int(rows[:, -1].argmax())].tolist()
    ready, due = rows[:, : len(sizes)].amax(0).tolist(), slowest[len(sizes) : 2 * len(sizes)]
    backward_s, compute_s = slowest[-2:]
    chunks = [Chunk(*chunk) for chunk in zip(sizes, ready, due, strict=True)]
    planned = (next_use_first if order == "next-use" else ready_first)(chunks, link)
    ahead = predict_ahead(chunks, link, compute_s, planned)
    return ahead, predict_barrier(chunks, link, compute_s, backward_s)
