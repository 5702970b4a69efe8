"""Made images and texts of any shape: the same at any number of ranks, cheap, and possible to learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from syncline.errors import PlanError
from syncline.plan import Plan
from syncline.workload.data.batches import Batches
from syncline.workload.data.made import made_batches, synthetic_task
from syncline.workload.inputs import USUAL, check_input, is_cifar_shaped
from syncline.workload.sharding import Sharding
from syncline.workload.tasks import NO_ANSWER


def made(model: str = "vgg11", data: str = "synthetic", **keys: int) -> Batches:
    return made_batches(Plan(model=model, data=data, channels_last=False, **keys))  # type: ignore[arg-type]


KINDS = {
    "images": lambda seed=1: made(image_size=24, num_classes=7, seed=seed),
    "ages": lambda seed=1: made(data="synthetic-ages", image_size=24, seed=seed),
    "texts": lambda seed=1: made("bert-small", num_classes=90, sequence_length=20, seed=seed),
}


def batch(batches: Batches, rank: int = 0, world_size: int = 1, epoch: int = 0) -> tuple[Tensor, Tensor]:
    return batches.train(next(Sharding(batches.num_train, 11, 5, rank, world_size).epoch(epoch, 3)))


@pytest.mark.parametrize("kind", KINDS)
def test_shards_are_the_batch_of_one_worker_to_the_bit(kind: str) -> None:
    inputs, targets = batch(KINDS[kind]())
    for world_size in (2, 3, 11):
        parts = [batch(KINDS[kind](), rank, world_size) for rank in range(world_size)]
        assert torch.equal(torch.cat([part[0] for part in parts]), inputs)
        assert torch.equal(torch.cat([part[1] for part in parts]), targets)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_changes_with_the_seed_and_the_epoch_but_stays_what_it_is(kind: str) -> None:
    batches = KINDS[kind]()
    shard = next(Sharding(batches.num_train, 11, 5).epoch(0))
    later = next(Sharding(batches.num_train, 11, 5, shuffle=False).epoch(1))
    later = type(later)(1, 0, shard.indices, 11, 1)
    (first, targets), (other, other_targets) = batches.train(shard), batches.train(later)
    (seeded, _) = KINDS[kind](2).train(shard)
    assert not torch.equal(first, other)
    assert not torch.equal(first, seeded)
    if kind != "texts":
        assert torch.equal(targets, other_targets)


@pytest.mark.parametrize("kind", KINDS)
def test_empty_shard_gets_stand_ins_and_test_samples_are_fixed(kind: str) -> None:
    batches = KINDS[kind]()
    inputs, targets = batch(batches, 11, 12)
    assert len(inputs) == len(targets) == 2
    whole = batches.test(0, batches.num_test + 5)
    assert len(whole[0]) == batches.num_test
    again = KINDS[kind](2).test(30, 40)
    assert torch.equal(whole[0][30:40], again[0])
    assert torch.equal(whole[1][30:40], again[1])


def test_every_model_gets_data_of_its_usual_shape() -> None:
    for name, usual in USUAL.items():
        plan = Plan(model=name, data="synthetic")
        task = synthetic_task(plan)
        assert (task.unit, task.num_classes) == (usual.unit, usual.num_classes)
        assert task.input_shape[-1] == usual.size
        assert is_cifar_shaped(plan) == (usual == USUAL["vgg11"])


def test_images_are_of_the_right_size_and_layout_and_ages_of_the_right_range() -> None:
    batches = made_batches(Plan(model="resnet50", data="synthetic-ages", image_size=40))
    inputs, targets = batch(batches)
    assert inputs.shape == (11, 3, 40, 40)
    assert inputs.is_contiguous(memory_format=torch.channels_last)
    assert batches.in_dtype(torch.float64).test(0, 2)[0].dtype == torch.float64
    assert batches.task.name == "age"
    every = batches.test(0, 100)[1]
    assert 0 <= int(every.min()) < 10
    assert 90 < int(every.max()) <= 100
    assert "ages 0 to 100" in batches.source
    assert len(targets) == 11


@pytest.mark.parametrize(("kind", "better"), [("images", 0.5), ("ages", 12.0)])
def test_a_small_network_learns_made_images(kind: str, better: float) -> None:
    torch.manual_seed(0)
    batches = KINDS[kind]()
    task = batches.task
    model = nn.Sequential(
        nn.Conv2d(3, 8, 4, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 64), nn.ReLU(),
        nn.Linear(64, task.num_classes),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    inputs, targets = batches.test(0, 100)
    before = task.mean_score(task.score_sum(model(inputs), targets), 100)
    for shard, _ in zip(Sharding(batches.num_train, 64, 5).epoch(0), range(40), strict=False):
        optimizer.zero_grad()
        shown, asked = batches.train(shard)
        task.loss(model(shown), asked).backward()
        optimizer.step()
    after = task.mean_score(task.score_sum(model(inputs), targets), 100)
    assert (before < better < after) if task.metric == "accuracy" else (before > better > after)


def test_masks_are_as_many_in_every_text_and_as_in_the_paper() -> None:
    batches = made("bert-small", num_classes=90, sequence_length=128)
    inputs, targets = batches.train(next(Sharding(batches.num_train, 2000, 5).epoch(0)))
    asked = targets != NO_ANSWER
    assert set(asked.sum(1).tolist()) == {19} == {batches.task.answers_per_sample}
    assert torch.equal(inputs == 0, (inputs == 0) & asked)
    total = int(asked.sum())
    masked, kept = int((inputs == 0).sum()), int((inputs == targets).sum())
    assert masked / total == pytest.approx(0.8, abs=0.01)
    assert kept / total == pytest.approx(0.1, abs=0.01)  # by chance a replaced one may be itself
    assert int(asked.sum(0).min()) > 0.8 * 2000 * 19 / 128, "every place is asked for"
    assert int(inputs.max()) < 90


def test_neighbours_tell_a_masked_token() -> None:
    batches = made("bert-small", sequence_length=40)
    texts = batches._train(np.arange(50))  # type: ignore[attr-defined]
    strides = np.diff(texts, axis=1) % 61
    assert (strides == strides[:, :1]).all()
    assert len(set(strides[:, 0].tolist())) == 8


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"model": "bert-small", "data": "cifar10"}, "bert-small reads texts"),
        ({"model": "bert-base", "data": "synthetic-ages"}, "bert-base reads texts"),
        ({"model": "resnet50", "data": "text", "data_dir": "x"}, "resnet50 reads images"),
        ({"model": "bert-small", "data": "text"}, "data text needs a text"),
        ({"model": "vgg16", "data": "synthetic", "sequence_length": 9}, "sequence_length 9 cannot"),
        ({"model": "vgg16", "data": "synthetic-ages", "num_classes": 9}, "num_classes 9 cannot"),
        ({"model": "bert-small", "data": "synthetic", "image_size": 9}, "image_size 9 cannot"),
    ],
)
def test_data_that_a_model_cannot_read_is_refused(keys: dict[str, object], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        check_input(Plan(**keys))  # type: ignore[arg-type]
