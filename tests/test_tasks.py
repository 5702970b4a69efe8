"""Tasks: what each counts as wrong and as good, and that samples weigh the same wherever they are."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from syncline.workload.tasks import (
    AUXILIARY_WEIGHT,
    NO_ANSWER,
    Task,
    age_estimation,
    classification,
    masked_language,
)

CLASSES, LENGTH, MASKED = 7, 9, 3
TASKS = [classification(CLASSES, (3, 4, 4)), age_estimation((3, 4, 4)), masked_language(CLASSES, LENGTH, MASKED)]


def sample(task: Task, count: int) -> tuple[Tensor, Tensor]:
    """Answers and targets; of a text, MASKED places of each sample ask for something."""
    stream = torch.Generator().manual_seed(1)
    places = (count,) if task.unit == "images" else (count, LENGTH)
    answers = torch.randn(*places, task.num_classes, generator=stream, dtype=torch.float64)
    targets = torch.randint(task.num_classes, places, generator=stream)
    if task.unit == "tokens":
        asked = torch.rand(places, generator=stream).argsort(1) < MASKED
        targets = targets.where(asked, NO_ANSWER)
    return answers, targets


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
@pytest.mark.parametrize("sizes", [(5, 3), (7, 1), (8,)])
def test_shards_weighed_by_their_samples_give_the_mean_of_the_batch(task: Task, sizes: tuple[int, ...]) -> None:
    answers, targets = sample(task, 8)
    shards = zip(answers.split(sizes), targets.split(sizes), sizes, strict=True)
    weighed = sum(task.loss(answer, target) * size / 8 for answer, target, size in shards)
    torch.testing.assert_close(weighed, task.loss(answers, targets), rtol=1e-12, atol=0)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_sum_over_answers_is_their_number_of_means(task: Task) -> None:
    answers, targets = sample(task, 8)
    mean = task.loss(answers, targets)
    torch.testing.assert_close(task.loss(answers, targets, reduction="sum"), mean * 8 * task.answers_per_sample)


def test_classification_is_plain_cross_entropy_to_the_bit_and_counts_right_answers() -> None:
    task = TASKS[0]
    answers, targets = sample(task, 8)
    assert torch.equal(task.loss(answers, targets), cross_entropy(answers, targets))
    smooth = task.loss(answers, targets, label_smoothing=0.1)
    assert torch.equal(smooth, cross_entropy(answers, targets, label_smoothing=0.1))
    best = torch.nn.functional.one_hot(targets, CLASSES).double()
    best[0] = best[0].roll(1)
    assert task.score_sum(best, targets) == 7
    assert task.mean_score(7, 8) == 7 / 8
    assert task.describe(7, 8) == "accuracy 87.50%"


def test_age_is_scored_by_the_expected_age() -> None:
    task = age_estimation((3, 4, 4))
    answers = torch.full((2, 101), -torch.inf)
    answers[0, [20, 30]] = 1.0  # certain that it is one of the two: 25 is expected
    answers[1, 60] = 1.0
    targets = torch.tensor([28, 50])
    assert task.score_sum(answers, targets) == pytest.approx(3 + 10)
    assert task.describe(13, 2) == "mean absolute error 6.50 years"
    assert task.metric == "absolute_error"


def test_text_is_judged_at_the_masked_places_only() -> None:
    task = TASKS[2]
    answers, targets = sample(task, 4)
    chosen = targets != NO_ANSWER
    assert int(chosen.sum()) == 4 * MASKED
    assert task.loss(answers, targets) == pytest.approx(float(cross_entropy(answers[chosen], targets[chosen])))
    right = (answers.argmax(-1) == targets)[chosen].sum()
    assert task.score_sum(answers, targets) == float(right)
    assert task.mean_score(6, 4) == 6 / (4 * MASKED)
    assert task.throughput(4, 2.0) == {"tokens_per_s": 4 * LENGTH / 2.0}
    assert TASKS[0].throughput(4, 2.0) == {"images_per_s": 2.0}


def test_auxiliary_heads_are_added_to_the_loss_and_not_to_the_score() -> None:
    task = TASKS[0]
    answers, targets = sample(task, 8)
    assert AUXILIARY_WEIGHT == 0.4
    other = -answers
    expected = cross_entropy(answers, targets) + AUXILIARY_WEIGHT * cross_entropy(other, targets)
    torch.testing.assert_close(task.loss((answers, other), targets), expected)
    assert task.score_sum((answers, other), targets) == task.score_sum(answers, targets)


def test_outputs_of_transformers_models_are_understood() -> None:
    task = TASKS[0]
    answers, targets = sample(task, 8)
    assert torch.equal(task.loss(SimpleNamespace(logits=answers), targets), task.loss(answers, targets))
