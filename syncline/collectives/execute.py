"""The executor: runs any schedule in place on a flat buffer, over any Communicator.

A rank's part of a schedule is worked out once per buffer size: neighbouring chunks for the same peer travel as one
message, and scratch memory for what is to be added is kept.

With a 16-bit wire, values are rounded when they are sent and added in the buffer's own precision. A rank that hands
out a result rounds its own copy too, so that all ranks end with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from syncline.collectives.schedule import Message, RankRound, Schedule, rank_rounds
from syncline.comm.communicator import Communicator, Operation


class Executor:
    """Sums a flat buffer over all ranks, in place. One executor serves one thread at a time."""

    def __init__(self, communicator: Communicator, schedule: Schedule, wire_dtype: torch.dtype | None = None) -> None:
        self.communicator = communicator
        self.schedule = schedule
        self.wire_dtype = wire_dtype
        self._rounds: dict[int, tuple[RankRound, ...]] = {}
        self._scratch: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    @property
    def scratch_bytes(self) -> int:
        return sum(scratch.nbytes for scratch in self._scratch.values())

    def sum(self, buffer: Tensor, *, label: str = "", ready_ns: int | None = None) -> None:
        size = buffer.numel()
        if size not in self._rounds:
            self._rounds[size] = rank_rounds(self.schedule, self.communicator.rank, size)
        operation = Operation("schedule", buffer, label=f"{self.schedule.name} {label}".strip(), ready_ns=ready_ns)
        self.communicator.run(operation, lambda backend: self._run(backend, buffer))

    def _run(self, backend: Communicator, buffer: Tensor) -> None:
        for messages in self._rounds[buffer.numel()]:
            pairs = list(zip(messages.receives, self._landing(messages.receives, buffer), strict=True))
            receives = [backend.receive(into, message.peer) for message, into in pairs]
            sends = [backend.send(self._outgoing(message, buffer), message.peer) for message in messages.sends]
            for (message, landed), work in zip(pairs, receives, strict=True):
                work.wait()
                part = buffer[message.start : message.stop]
                if message.op == "add":
                    part.add_(landed)
                elif landed.dtype != part.dtype:
                    part.copy_(landed)
            for work in sends:
                work.wait()

    def _outgoing(self, message: Message, buffer: Tensor) -> Tensor:
        part = buffer[message.start : message.stop]
        if self.wire_dtype is None:
            return part
        rounded = part.to(self.wire_dtype)
        if message.op == "copy":
            part.copy_(rounded)
        return rounded

    def _landing(self, receives: Sequence[Message], buffer: Tensor) -> list[Tensor]:
        """Where each message arrives: in place if it replaces, else in scratch memory."""
        dtype = self.wire_dtype or buffer.dtype
        in_place = self.wire_dtype is None
        needed = sum(m.stop - m.start for m in receives if m.op == "add" or not in_place)
        scratch = self._scratch_of(needed, dtype, buffer.device)
        landing, used = [], 0
        for message in receives:
            if message.op == "copy" and in_place:
                landing.append(buffer[message.start : message.stop])
            else:
                size = message.stop - message.start
                landing.append(scratch[used : used + size])
                used += size
        return landing

    def _scratch_of(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        scratch = self._scratch.get((dtype, device))
        if scratch is None or scratch.numel() < size:
            scratch = self._scratch[dtype, device] = torch.empty(size, dtype=dtype, device=device)
        return scratch
