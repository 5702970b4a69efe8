"""What a plan's model costs: operations, bytes of gradients and of activations, by shapes alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from syncline.plan import Plan


@dataclass(frozen=True)
class Cost:
    flops: float
    """To train on one sample."""
    parameters: int
    sample_bytes: int
    """That one sample occupies between forward and backward."""
    gradient_bytes: int
    """That a worker has to share in each step."""
    guessed: bool = False


GUESS = Cost(1e9, 10_000_000, 10_000_000, 40_000_000, guessed=True)
"""For what is only known once it is built: a user's own model, a vocabulary that a text decides."""


def cost_of(plan: Plan) -> Cost:
    """Of the plan's model on inputs of the size and classes that the plan gives."""
    if ":" in plan.model:
        return GUESS
    ages = plan.data in ("imdb-wiki", "synthetic-ages")
    return _cost(plan.model, ages, plan.image_size, plan.num_classes, plan.sequence_length)


@cache
def _cost(
    model: str, ages: bool, image_size: int | None, num_classes: int | None, sequence_length: int | None
) -> Cost:
    from syncline.workload.profile import profile
    from syncline.workload.shapes import synthetic_task

    shape = {"image_size": image_size, "num_classes": num_classes, "sequence_length": sequence_length}
    plan = Plan.model_validate({"model": model, "data": "synthetic-ages" if ages else "synthetic", **shape})
    found = profile(model, synthetic_task(plan))
    return Cost(found.training_flops, found.parameters, found.activation_bytes, found.gradient_bytes)
