"""The [optimizer] section of a plan: which optimiser, its options, and the schedule of its rate.

Every optimiser has options of its own and refuses those of others. What is not given comes from the recipe; what the
recipe does not say either, from the optimiser.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from syncline.forms import Section
from syncline.words import DEFAULT_RECIPES, MODELS, OPTIMIZERS, RECIPES, RECIPES_OF_TEN_EPOCHS

SHARED = ("decay_all", "schedule", "peak_at", "warmup", "warmup_epochs", "label_smoothing", "init", "clip_norm")
"""What a recipe says for any optimiser. The rest, such as its rate, holds for the recipe's own optimiser only."""
OWN = tuple(dict.fromkeys(option for defaults in OPTIMIZERS.values() for option in defaults))


class Optimizer(Section):
    """The optimiser and its schedule. Keys that you give override the recipe's."""

    name: Literal["sgd", "adamw", "adam"] = "sgd"
    """The optimiser: torch's SGD, AdamW or Adam."""
    learning_rate: float = Field(0.1, gt=0)
    """Peak learning rate; with linear_scaling, the one for a global batch of 256. Default 0.1 for sgd, else 0.001."""
    linear_scaling: bool = False
    """Multiply the rate by global batch / 256."""
    momentum: float | None = Field(None, ge=0, lt=1)
    """sgd: share of the last update that carries over to the next; default 0.9."""
    nesterov: bool | None = None
    """sgd: use Nesterov momentum; default no."""
    betas: tuple[float, float] | None = None
    """adamw, adam: what the running means of the gradient and of its square keep each step; default 0.9, 0.999."""
    eps: float | None = Field(None, gt=0)
    """adamw, adam: added to the root of the mean square before dividing by it; default 1e-8."""
    weight_decay: float = Field(1e-4, ge=0)
    """L2 penalty; with adamw, the share of a weight that a step at rate 1 takes away. Default 1e-4 for sgd, 0.01 for
    adamw, 0 for adam."""
    decay_all: bool = True
    """Decay every parameter; if false, leave out biases and norms (parameters of one dimension)."""
    clip_norm: float | None = Field(None, gt=0)
    """Longest gradient: a longer one, over all parameters and averaged over ranks, is scaled down to this norm."""
    schedule: Literal["constant", "cosine", "one-cycle"] = "constant"
    """How the rate changes over the run: not at all, down to 0 as a half cosine, or up and down."""
    peak_at: float = Field(0.25, gt=0, lt=1)
    """Share of the steps after which one-cycle peaks."""
    warmup: Literal["none", "gradual", "constant"] = "none"
    """The first epochs: at the scaled rate, ramping up to it from the rate of batch 256, or at that lower rate."""
    warmup_epochs: float = Field(5.0, gt=0)
    """Length of the warm-up."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Share of each label that is spread over all classes."""
    init: Literal["torch", "kaiming-fan-out"] = "torch"
    """Initial weights: torch's defaults, or normal with variance 2 / fan-out for convolutions."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_optimizer(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        present = {key: value for key, value in given.items() if value is not None}
        name = present.get("name", "sgd")
        return {**OPTIMIZERS[name], **present} if name in OPTIMIZERS else present

    @model_validator(mode="after")
    def _keys_agree(self) -> Self:
        for option in OWN:
            if getattr(self, option) is not None and option not in OPTIMIZERS[self.name]:
                owners = ", ".join(name for name, options in OPTIMIZERS.items() if option in options)
                raise ValueError(
                    f"{self.name} has no option {option}; these optimisers have it: {owners}. Leave {option} out."
                )
        if self.betas is not None and not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas {self.betas[0]:g}, {self.betas[1]:g}: each must be at least 0 and below 1.")
        if self.schedule == "one-cycle" and self.warmup != "none":
            raise ValueError("schedule one-cycle rises by itself: leave warmup at none.")
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs momentum: set momentum above 0.")
        return self

    @property
    def options(self) -> dict[str, Any]:
        """Keywords of torch's class."""
        return {option: getattr(self, option) for option in OPTIMIZERS[self.name]}


def with_recipe(given: Mapping[str, Any], recipe: str, *, model: Any, data: Any, epochs: Any) -> dict[str, Any]:
    """The [optimizer] of a plan with what its recipe says about the keys that are not given."""
    says = {**RECIPES[recipe]}
    if recipe == "default":
        says |= DEFAULT_RECIPES["texts" if reads_texts(model, data) else "images"]
    if isinstance(epochs, int) and epochs >= 10:
        says |= RECIPES_OF_TEN_EPOCHS.get(recipe, {})
    own = says.get("name", "sgd")
    if given.get("name", own) != own:
        says = {key: value for key, value in says.items() if key in SHARED}
    return {**says, **given}


def reads_texts(model: Any, data: Any) -> bool:
    return data == "text" or (isinstance(model, str) and model in MODELS and MODELS[model].texts)
