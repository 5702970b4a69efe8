"""Evaluation: every test image once, the same digits at any number of ranks, and nothing is left changed."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from helpers import images, on_processes, on_threads, small_batches
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from syncline.comm import Communicator
from syncline.spans import EventLog
from syncline.training import evaluate as module
from syncline.training.evaluate import Evaluation, evaluate, evaluate_per_rank

WORLD_SIZES = [1, 2, 3, 4]


@pytest.fixture(autouse=True)
def _small_evaluation_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """47 test images in batches of 10: the last batch is short, and 5 batches do not divide by 2, 3 or 4."""
    monkeypatch.setattr(module, "BATCH", 10)


@cache
def template() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(
            nn.Conv2d(3, 4, 3, stride=4), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(), nn.Linear(256, 10)
        )


def model_of(rank: int) -> nn.Module:
    """The same weights on every rank, but other batch-norm statistics."""
    model = copy.deepcopy(template())
    model[1].running_mean.fill_(0.1 * rank)
    model[1].running_var.fill_(1.0 + rank)
    return model


def reference(rank: int) -> tuple[float, int]:
    """Loss and number right with a rank's own buffers, on all images at once."""
    model = model_of(rank).eval()
    inputs, labels = small_batches().test(0, 47)
    with torch.no_grad():
        logits = model(inputs)
    return float(cross_entropy(logits, labels)), int((logits.argmax(1) == labels).sum())


def evaluated(comm: Communicator, _: EventLog) -> Evaluation:
    return evaluate(model_of(comm.rank), small_batches(), comm)


def test_result_is_the_same_to_the_bit_at_any_world_size() -> None:
    loss, correct = reference(0)
    results = {one for world_size in WORLD_SIZES for one in on_threads(world_size, evaluated)}
    assert len(results) == 1
    (result,) = results
    assert (result.score_sum, result.num_samples) == (correct, 47)
    assert result.loss == pytest.approx(loss, rel=1e-6)
    assert reference(1)[0] != pytest.approx(loss, rel=1e-3), "other buffers must give another loss"


def test_result_is_the_same_over_processes() -> None:
    assert len(set(on_processes(3, evaluated))) == 1


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_image_is_seen_once(world_size: int) -> None:
    class Watching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Tensor] = []

        def forward(self, inputs: Tensor) -> Tensor:
            self.seen += list(inputs.sum((1, 2, 3), dtype=torch.float64))
            return torch.nn.functional.one_hot(torch.zeros(len(inputs), dtype=torch.int64), 10).float()

    def live(comm: Communicator, _: EventLog) -> tuple[list[Tensor], Evaluation]:
        model = Watching()
        result = evaluate(model, small_batches(), comm)
        return model.seen, result

    found = on_threads(world_size, live)
    every = sorted(small_batches().test(0, 47)[0].sum((1, 2, 3), dtype=torch.float64).tolist())
    assert len(set(every)) == 47
    assert sorted(float(value) for seen, _ in found for value in seen) == every
    zeros = int((images().test_labels == 0).sum())
    assert {result.score_sum for _, result in found} == {zeros}


def test_buffers_and_training_mode_are_left_as_they_were() -> None:
    def live(comm: Communicator, log: EventLog) -> None:
        model = model_of(comm.rank).train()
        model[1].eval()  # a frozen layer
        before = copy.deepcopy(model.state_dict())
        evaluate(model, small_batches(), comm)
        evaluate_per_rank(model, small_batches(), comm)
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, before[name]), name
        assert [layer.training for layer in model] == [True, False, True, True, True, True]
        assert model.training

    on_threads(2, live)


def test_training_mode_comes_back_after_an_error() -> None:
    def live(comm: Communicator, _: EventLog) -> None:
        model = nn.Sequential(nn.Linear(3, 3))
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            evaluate(model, small_batches(), comm)
        assert model.training

    on_threads(1, live)


def test_per_rank_evaluation_uses_each_ranks_own_buffers() -> None:
    def live(comm: Communicator, _: EventLog) -> list[Evaluation]:
        return evaluate_per_rank(model_of(comm.rank), small_batches(), comm)

    for results in on_threads(3, live):
        for rank, result in enumerate(results):
            loss, correct = reference(rank)
            assert result.loss == pytest.approx(loss, rel=1e-6)
            assert (result.score_sum, result.num_samples) == (correct, 47)


def test_only_the_first_samples_are_evaluated_where_that_is_asked() -> None:
    def live(comm: Communicator, _: EventLog) -> list[Evaluation]:
        model = model_of(0)
        own = evaluate_per_rank(model, small_batches(), comm, limit=10)[0]
        return [
            evaluate(model, small_batches(), comm, limit=10),
            own,
            evaluate(model, small_batches(), comm, limit=99),
        ]

    for some, own, every in on_threads(2, live):
        assert (some.num_samples, own.num_samples, every.num_samples) == (10, 10, 47)
        assert some.loss == pytest.approx(own.loss, rel=1e-6)
        assert some.loss != every.loss
