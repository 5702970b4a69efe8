"""What method ahead measures and agrees on with other ranks: the times of a step, the link's rate, one order."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
from syncline.sync.bucketed import Sender

PROBES = ((524_288, 4), (2_097_152, 4))
"""Streams: bytes of each transfer, and how many. Of sizes that chunks may have: several on their way at once hide
each other's start, so what far smaller ones take says little about these."""
PROBE_REPEATS = 3


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
        seconds_per_byte: float,
    ) -> None:
        """The step whose next forward has just ended: where its parameters are waited for, which chunks they are in,
        when each was ready, and how fast the link was. Chunks with flags are due when forward begins."""
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
        self.records.append([*(max(0.0, (at_ns - self._backward_ns) / 1e9) for at_ns in times), seconds_per_byte])

    def _now(self) -> int:
        return time.monotonic_ns() - self.stalled_ns


def measure_link(sender: Sender, communicator: Communicator) -> Link:
    """From streams of transfers of two sizes, sent as chunks are: through the sender, several on their way at once.
    As rank 0 sees them; the quickest stream counts, since other work only makes them slower. Collective."""
    seconds = [
        min(_stream_s(sender, num_bytes, count, communicator.device) for _ in range(PROBE_REPEATS)) / count
        for num_bytes, count in PROBES
    ]
    agreed = torch.tensor(seconds, dtype=torch.float64, device=communicator.device)
    with communicator.scope("probe"):
        communicator.broadcast(agreed, label="probe")
    small_s, large_s = agreed.tolist()
    small_bytes, large_bytes = (num_bytes for num_bytes, _ in PROBES)
    beta = max((large_s - small_s) / (large_bytes - small_bytes), 1e-12)
    return Link(max(small_s - beta * small_bytes, 0.0), beta)


def _stream_s(sender: Sender, num_bytes: int, count: int, device: torch.device) -> float:
    values = torch.zeros(count, num_bytes // 4, device=device)
    start_ns = time.monotonic_ns()
    for number in range(count):
        sender.send(number, values[number], start_ns, label="probe")
    for work in sender.collect(count):
        work.wait()
    return (time.monotonic_ns() - start_ns) / 1e9


@dataclass(frozen=True)
class TransferPlan:
    by_urgency: tuple[int, ...]
    """Chunks, the one that goes first if all are ready first."""
    ahead: Prediction
    with_barrier: Prediction


def plan_transfers(
    communicator: Communicator, records: Tensor, sizes: Sequence[int], link: Link, order: Order
) -> TransferPlan:
    """What is urgent, and what to expect. Collective.

    `records` has a row for each step: in seconds of compute since backward began, when each chunk was ready and when
    it was needed, then the end of backward and of the next forward; and what the link took for a byte beside compute,
    0 if that is not known, where `link` is what it takes alone. A chunk is ready when it is on the last rank; the
    slowest rank's forward says when it is due. All ranks compute the same from the same figures.
    """
    with communicator.scope("transfer plan"):
        parts = communicator.all_gather(records.median(0).values.to(communicator.device), label="transfer plan")
    rows = torch.stack([part.cpu() for part in parts])
    slowest = rows[int(rows[:, -2].argmax())].tolist()
    ready, due = rows[:, : len(sizes)].amax(0).tolist(), slowest[len(sizes) : 2 * len(sizes)]
    backward_s, compute_s = slowest[-3:-1]
    beside_compute = float(rows[:, -1].max())
    if beside_compute > 0:
        link = Link(0.0, beside_compute)
    chunks = [Chunk(*chunk) for chunk in zip(sizes, ready, due, strict=True)]
    sent, urgent = (next_use_first, due) if order == "next-use" else (ready_first, ready)
    return TransferPlan(
        tuple(sorted(range(len(chunks)), key=urgent.__getitem__)),
        predict_ahead(chunks, link, compute_s, sent(chunks, link)),
        predict_barrier(chunks, link, compute_s, backward_s),
    )
