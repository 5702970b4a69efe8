"""How far another host's monotonic clock is from rank 0's: pings, the quickest of which counts.

A rank notes its time, sends, gets rank 0's time back and notes its time again. Rank 0 answered somewhere in between:

    offset = answer - (sent + received) / 2,  wrong by (received - sent) / 2 at most

Ranks that read rank 0's own clock need no ping.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

import torch
from torch import Tensor

from syncline.comm.communicator import Communicator
from syncline.spans import EventLog, clock_identity

ROUNDS = 20

Now = Callable[[], int]


def note_clock(
    communicator: Communicator, log: EventLog, *, now: Now = time.monotonic_ns, identity: str | None = None
) -> None:
    """Write this rank's offset to rank 0's clock into the log, if ranks have more than one clock. Collective."""
    if communicator.world_size == 1:
        return
    others = _ranks_with_another_clock(communicator, identity or clock_identity())
    if communicator.rank == 0:
        for rank in others:
            _answer(communicator, rank, now)
    elif communicator.rank in others:
        offset_ns, interval_ns = _ask(communicator, now)
        log.add("clock", offset=offset_ns, interval=interval_ns, at=now(), rounds=ROUNDS)


def _ranks_with_another_clock(communicator: Communicator, clock: str) -> list[int]:
    number = int.from_bytes(hashlib.sha256(clock.encode()).digest()[:7], "big")
    with communicator.scope("clock identity"):
        own = torch.tensor([number], device=communicator.device)
        identities = [int(part.item()) for part in communicator.all_gather(own, label="clock identity")]
    return [rank for rank, identity in enumerate(identities) if identity != identities[0]]


def _ask(communicator: Communicator, now: Now) -> tuple[int, int]:
    """The offset of the quickest round trip, and half that trip."""
    message, best = _message(communicator), (0, 2**62)
    for _ in range(ROUNDS):
        with communicator.scope("clock"):
            sent = now()
            communicator.send(message, 0, label="clock").wait()
            communicator.receive(message, 0, label="clock").wait()
            received = now()
        interval = (received - sent + 1) // 2
        if interval < best[1]:
            best = (int(message.item()) - (sent + received) // 2, interval)
    return best


def _answer(communicator: Communicator, rank: int, now: Now) -> None:
    message = _message(communicator)
    for _ in range(ROUNDS):
        with communicator.scope("clock"):
            communicator.receive(message, rank, label="clock").wait()
            communicator.send(message.fill_(now()), rank, label="clock").wait()


def _message(communicator: Communicator) -> Tensor:
    return torch.zeros(1, dtype=torch.int64, device=communicator.device)
