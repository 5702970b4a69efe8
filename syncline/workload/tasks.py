"""Tasks: what a model is asked, how wrong an answer is, and how good.

A task is the same for every model that takes its inputs. All answers are weights over classes (labels, ages,
tokens), so one loss serves all; they differ in what counts as good. The data decides the task: whoever gives targets
knows what they mean.

Every sample has the same number of answers, so that a sample weighs the same wherever it is: a shard's share of the
global batch is its share of the samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

AUXILIARY_WEIGHT = 0.4
"""What a loss of an auxiliary head counts beside that of the answer; the figure of the Inception papers."""
NO_ANSWER = -100
"""A target that asks for nothing; cross_entropy leaves it out."""
AGES = 101


@dataclass(frozen=True)
class Task:
    """What is asked about each sample."""

    name: str
    num_classes: int
    """Width of the model's answer: labels, ages, or the vocabulary."""
    input_shape: tuple[int, ...]
    """Of one sample: channels, rows, columns; or the length of a text."""
    score: Callable[[Tensor, Tensor], Tensor]
    """score(answer, targets): summed over all answers, as a tensor of one number; see `metric`."""
    metric: str = "accuracy"
    """What the mean of the scores is: accuracy, the share of right answers; absolute_error, the mean distance in
    years; or the name of a user's own."""
    unit: Literal["images", "tokens", "samples"] = "images"
    """What throughput counts."""
    answers_per_sample: int = 1
    own_loss: Callable[[Any, Tensor], Tensor] | None = None
    """A user's own: loss(outputs, targets), the mean over these samples."""
    own_metric: bool = False
    """The score is given the outputs as they are."""
    input_dtype: torch.dtype | None = None
    """Of inputs, where the unit does not tell."""

    @property
    def counts_right_answers(self) -> bool:
        """The sum of the scores is a number of right answers."""
        return self.metric == "accuracy" and not self.own_metric

    @property
    def asked(self) -> str:
        """What there is one answer for."""
        return "masked_tokens" if self.unit == "tokens" else self.unit

    @property
    def units_per_sample(self) -> int:
        return self.input_shape[0] if self.unit == "tokens" else 1

    def throughput(self, num_samples: int, seconds: float) -> dict[str, float]:
        """`images_per_s`, `tokens_per_s` or `samples_per_s`, for summaries."""
        return {f"{self.unit}_per_s": num_samples * self.units_per_sample / seconds}

    def loss(
        self,
        outputs: Any,
        targets: Tensor,
        *,
        reduction: Literal["mean", "sum"] = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """Mean or sum over the answers of these samples; the heads of a model that has several are added up."""
        if self.own_loss is not None:
            loss = self.own_loss(outputs, targets)
            return loss * len(targets) if reduction == "sum" else loss
        answer, *auxiliary = _heads(outputs)
        loss = _cross_entropy(answer, targets, reduction, label_smoothing)
        for head in auxiliary:
            loss = loss + AUXILIARY_WEIGHT * _cross_entropy(head, targets, reduction, label_smoothing)
        return loss

    def guess_loss(self, outputs: Any) -> float | None:
        """The loss of equal weights for all classes, whatever the targets; None where the loss is a user's own."""
        if self.own_loss is not None:
            return None
        return math.log(self.num_classes) * (1 + AUXILIARY_WEIGHT * (len(_heads(outputs)) - 1))

    def score_sum(self, outputs: Any, targets: Tensor) -> float:
        """Right answers, or years of error, in all of these samples."""
        with torch.no_grad():
            return float(self.score(outputs if self.own_metric else _heads(outputs)[0], targets))

    def example(self, count: int) -> Tensor:
        """Inputs of the right shape and kind, all zero, on torch's default device."""
        dtype = self.input_dtype or (torch.int64 if self.unit == "tokens" else torch.float32)
        return torch.zeros(count, *self.input_shape, dtype=dtype)

    def describe(self, score_sum: float, num_samples: int) -> str:
        """For people: `accuracy 71.20%`, `mean absolute error 6.31 years`."""
        mean = self.mean_score(score_sum, num_samples)
        if self.counts_right_answers:
            return f"accuracy {mean:.2%}"
        if self.metric == "absolute_error":
            return f"mean absolute error {mean:.2f} years"
        return f"{self.metric.replace('_', ' ')} {mean:.4g}"

    def mean_score(self, score_sum: float, num_samples: int) -> float:
        return score_sum / (num_samples * self.answers_per_sample)


def classification(num_classes: int, input_shape: tuple[int, ...]) -> Task:
    """Images into classes."""
    return Task("classification", num_classes, input_shape, right_answers)


def age_estimation(input_shape: tuple[int, ...]) -> Task:
    """Faces into the ages 0 to 100; scored by how far the expected age is from the true one."""
    return Task("age", AGES, input_shape, _years_of_error, metric="absolute_error")


def masked_language(vocabulary: int, length: int, num_masked: int) -> Task:
    """Texts with `num_masked` tokens to guess in each; targets are NO_ANSWER at all others."""
    return Task("masked language", vocabulary, (length,), right_answers, unit="tokens", answers_per_sample=num_masked)


def _heads(outputs: Any) -> list[Tensor]:
    """The answer, then auxiliary heads: of a tensor, a tuple, or an object with `logits` (transformers)."""
    if isinstance(outputs, Tensor):
        return [outputs]
    if isinstance(outputs, tuple | list):
        return list(outputs)
    return [outputs.logits]


def _cross_entropy(answer: Tensor, targets: Tensor, reduction: str, label_smoothing: float) -> Tensor:
    # Classes are the last dimension of an answer; what stands before it are samples, or samples and places.
    return cross_entropy(
        answer.flatten(0, -2),
        targets.flatten(),
        ignore_index=NO_ANSWER,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )


def right_answers(answer: Tensor, targets: Tensor) -> Tensor:
    return (answer.argmax(-1) == targets).sum()  # no class is NO_ANSWER


def _years_of_error(answer: Tensor, targets: Tensor) -> Tensor:
    ages = torch.arange(answer.shape[-1], device=answer.device, dtype=answer.dtype)
    expected = (answer.softmax(-1) * ages).sum(-1)
    return (expected - targets).abs().sum(dtype=torch.float64)
