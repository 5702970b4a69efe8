"""Verdicts on gradients: bitwise equal, equal up to summation order, different for a proven cause, or different."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from syncline.sync.after_backward import mean_in_rank_order

CLOSE = 1e-10
"""Float64 carries 16 digits; a reordered sum keeps the first 10, a wrong weight does not keep the third."""


@dataclass(frozen=True)
class Verdict:
    status: Literal["bitwise", "order", "lossy", "explained", "different"]
    ratio: float
    """Largest error over its bound; at most 1 is within."""
    index: int = 0
    """Element with the largest ratio."""
    where: str = ""
    cause: str = ""

    @property
    def passed(self) -> bool:
        return self.status != "different"


def judge_sum(found: Tensor, parts: Sequence[Tensor], wire_dtype: torch.dtype | None = None) -> Verdict:
    """Is `found` the mean of the parts, to the bit or within what the order of summation can do?

    A sum of n numbers in any order errs by at most (n-1) u sum|g_i|. Unless n is a power of two, dividing by n adds a
    rounding; multiplying by 1/n, as DDP does, adds one more, that of 1/n. A 16-bit wire rounds each number at most n
    times on its way and the result once more, with the wire's unit; such a result is lossy at best.
    """
    if torch.equal(found, mean_in_rank_order(parts)):
        return Verdict("bitwise", 0.0)
    num_parts = len(parts)
    roundings = num_parts - 1 if num_parts & (num_parts - 1) == 0 else num_parts + 1
    exact = torch.stack([part.double() for part in parts])
    unit = torch.finfo(found.dtype).eps / 2
    bound = roundings * unit * (1 + 1e-6) * exact.abs().sum(0) / num_parts
    error = found.double() - exact.sum(0) / num_parts
    if wire_dtype is None:
        return _within(error, bound + torch.finfo(found.dtype).tiny)
    wire = torch.finfo(wire_dtype)
    bound = bound + (num_parts + 1) * (
        wire.eps / 2 * exact.abs().sum(0) / num_parts + wire.smallest_normal * wire.eps
    )
    verdict = _within(error, bound)
    return replace(verdict, status="lossy") if verdict.passed else verdict


def judge_close(found: Tensor, reference: Tensor) -> Verdict:
    """Is `found` equal to the reference in every digit that float64 arithmetic can be held to?"""
    if torch.equal(found, reference):
        return Verdict("bitwise", 0.0)
    bound = torch.full_like(reference, CLOSE * float(reference.abs().max()) + torch.finfo(found.dtype).tiny)
    return _within(found - reference, bound)


def _within(error: Tensor, bound: Tensor) -> Verdict:
    # NaN compares as neither larger nor smaller; it must count as wrong.
    ratios = torch.nan_to_num(error.abs() / bound, nan=float("inf"))
    index = int(ratios.argmax())
    ratio = float(ratios[index])
    return Verdict("order" if ratio <= 1 else "different", ratio, index)


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """The one that decides: any difference first, then the largest error. Without verdicts, nothing is wrong."""
    order = {"different": 3, "lossy": 2, "order": 1, "bitwise": 0, "explained": 0}
    return max(
        verdicts,
        key=lambda verdict: (order[verdict.status], verdict.ratio),
        default=Verdict("bitwise", 0.0),
    )
