"""Is training well? Weights that ranks no longer share, or that are not numbers, and a loss that learns nothing."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from syncline.comm.communicator import Communicator
from syncline.comm.torch_backend import flat
from syncline.errors import CommunicationError, DriftError, NotFiniteError, SynclineError
from syncline.sync.base import in_one_piece, keras_statistics

FIRST_STEPS = 20
"""The loss may rise while momentum builds up; after these it should not be above that of a guess."""
RECENT = 10
ABOVE = 1.1
"""Data without a pattern keep the loss near that of a guess: not every step above it is a sign."""


@dataclass
class Replicas:
    """This rank's copy of the model, compared with the others' from time to time. Parameters only: batch-norm buffers
    may differ."""

    model: nn.Module
    communicator: Communicator
    agreed: int = 0
    """The step after which all ranks last held the same weights."""

    def compare(self, step: int) -> None:
        """Raises on every rank if weights differ after `step` steps. Collective."""
        if self.communicator.world_size == 1 or step == self.agreed:
            return
        statistics = {name for name, _ in keras_statistics(self.model)}
        named = [pair for pair in self.model.named_parameters() if pair[0] not in statistics]
        own = torch.stack([digest(parameter) for _, parameter in named])
        with self.communicator.scope("weights"):
            parts = self.communicator.all_gather(own.to(self.communicator.device), label="digests of the weights")
        by_rank = torch.stack(parts).cpu()
        differ = (by_rank != by_rank[0]).any(0).nonzero().flatten().tolist()
        if differ:
            ranks = minority(by_rank[:, differ[0]].tolist())
            raise self._drift(step, named[differ[0]][0], len(differ), ranks)
        self.agreed = step

    def _drift(self, step: int, name: str, count: int, ranks: Sequence[int]) -> SynclineError:
        numbers = " and ".join(map(str, ranks))
        everyone = len(ranks) == self.communicator.world_size
        who = f"rank{'s' if len(ranks) > 1 else ''} {numbers}"
        differ = "hold different weights" if everyone else f"hold{'s' if len(ranks) == 1 else ''} other weights"
        more = f", the first of {count} parameters that differ" if count > 1 else ""
        message = (
            f"{who} {differ}{'' if everyone else ' than the other ranks'} after step {step}: {name}{more}; "
            f"all ranks agreed after step {self.agreed}."
        )
        # An error of the others too, but not theirs.
        kind = DriftError if self.communicator.rank in ranks else CommunicationError
        action = "Look for what that rank alone does: another learning rate, a missed update, or failing memory."
        return kind(message, action=action, rank=self.communicator.rank, step=step)


def digest(parameter: Tensor) -> Tensor:
    """The sum of the bits, as whole numbers: a bit that flips changes it, and it takes as long as reading them."""
    data = flat(in_one_piece(parameter.detach())).view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()
    whole = data.numel() // 8 * 8
    return data[:whole].view(torch.int64).sum() + data[whole:].sum()


def minority(values: Sequence[int]) -> list[int]:
    """The ranks that differ from what more than half of them hold; all, where no value has so many."""
    value, count = Counter(values).most_common(1)[0]
    return [rank for rank, own in enumerate(values) if 2 * count <= len(values) or own != value]


def refuse_spoiled_weights(model: nn.Module, *, rank: int, step: int) -> None:
    """Before a checkpoint is written: it must not hold what no run can go on from."""
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter.detach().sum()):
            raise NotFiniteError(
                f"the weights {name} are not finite after the update.",
                action="Lower the learning rate, or clip gradients.",
                rank=rank,
                step=step,
            )


class LossWatch:
    """Says once that a run learns nothing."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._said = False

    def look(self, step: int, loss: float, guess: float | None, rate: float) -> str:
        """One line if recent losses, of which this is the next, are above that of a uniform guess; else nothing."""
        self._recent.append(loss)
        mean = sum(self._recent) / len(self._recent)
        if self._said or guess is None or step < FIRST_STEPS or not mean > ABOVE * guess:
            return ""
        self._said = True
        return (
            f"the loss of the last {len(self._recent)} steps, {mean:.3g}, is above that of a uniform guess, "
            f"{guess:.3g}: the learning rate, {rate:.3g}, is probably too high for this model and batch"
        )
