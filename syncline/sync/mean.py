"""The mean of the ranks' gradients, summed in rank order: the order that the sequential reference takes too."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def mean_in_rank_order(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total.div_(len(parts))
