"""What a plan says about every step, as keywords of `Worker`."""

from __future__ import annotations

from typing import Any

from syncline.plan import Plan


def step_settings(plan: Plan) -> dict[str, Any]:
    return {
        "precision": "float32" if plan.replayed else plan.precision,
        "on_nan": "ignore" if plan.replayed else plan.on_nan,
        "label_smoothing": plan.optimizer.label_smoothing,
        # Replayed gradients are all 1 in memory that is never written: there is nothing to scale.
        "clip_norm": None if plan.replayed else plan.optimizer.clip_norm,
    }
