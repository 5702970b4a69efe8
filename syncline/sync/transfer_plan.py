"""What method ahead agrees on with the other ranks: the link's rate, and one order of transfers for all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor

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
