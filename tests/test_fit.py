"""A batch that a model cannot take is refused before training, with the smallest one that works."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from syncline.errors import PlanError
from syncline.plan import Plan
from syncline.workload.dry_run import check_fit, smallest_shard
from syncline.workload.models import build_model, usual_task
from syncline.workload.sharding import Sharding
from syncline.workload.tasks import classification


def fits(name: str, samples: int, batch: int, workers: int, steps: int = 10**6) -> None:
    task = usual_task(name)
    with torch.device("meta"):
        model = build_model(name, seed=0, task=task).train()
    check_fit(Plan(model=name), model, task, Sharding(samples, batch, 0, 0, workers), steps)


@pytest.mark.parametrize(
    ("samples", "batch", "workers", "steps", "smallest"),
    [
        (100, 10, 2, 10, 5),
        (100, 3, 2, 10, 1),
        (101, 10, 2, 11, 1),
        (101, 10, 2, 10, 5),
        (4, 8, 3, 1, 1),
        (2, 8, 3, 1, 1),
    ],
)
def test_smallest_shard_that_a_run_meets(samples: int, batch: int, workers: int, steps: int, smallest: int) -> None:
    assert smallest_shard(Sharding(samples, batch, 0, 0, workers), steps) == smallest


def test_one_sample_is_refused_where_batch_norm_has_one_value() -> None:
    """Inception's auxiliary head has no rows and columns left."""
    fits("inception-v3", 100, 4, 2)
    with pytest.raises(PlanError, match=r"leaves a worker with 1 sample.* at least 2 .* global batch of 4\."):
        fits("inception-v3", 100, 3, 2)


def test_last_batch_of_an_epoch_counts_if_the_run_meets_it() -> None:
    task = classification(3, (3, 4, 4))
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 3), nn.BatchNorm1d(3))
    check_fit(Plan(model="my:model"), model, task, Sharding(101, 10, 0, 0, 2), 10)
    with pytest.raises(PlanError, match=r"in the last step of an epoch of 101.*global batch of 12\."):
        check_fit(Plan(model="my:model"), model, task, Sharding(101, 10, 0, 0, 2), 11)
    check_fit(Plan(model="my:model"), model, task, Sharding(101, 12, 0, 0, 2), 9)


def test_so_few_samples_that_no_batch_fits_are_said_to_be_too_few() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 3), nn.BatchNorm1d(3))
    plan = Plan(model="my:model", global_batch=3, workers=3)
    with pytest.raises(PlanError, match=r"Use fewer workers: 4 samples are too few"):
        check_fit(plan, model, classification(3, (3, 4, 4)), Sharding(4, 3, 0, 0, 3), 5)


@pytest.mark.parametrize("name", ["vgg11", "resnet18", "vgg16", "cnn", "bert-small"])
def test_one_sample_is_fine_where_there_are_rows_and_columns_or_no_batch_norm(name: str) -> None:
    fits(name, 10, 2, 2)


def test_own_model_is_asked_too_and_left_as_it_was() -> None:
    task = classification(3, (3, 4, 4))
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(PlanError, match=r"my:model needs at least 2"):
        check_fit(Plan(model="my:model"), model, task, Sharding(10, 2, 0, 0, 2), 5)
    check_fit(Plan(model="my:model"), model, task, Sharding(10, 4, 0, 0, 2), 2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_own_model_that_cannot_run_on_shapes_alone_is_not_judged() -> None:
    class Odd(nn.Sequential):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return super().forward(inputs * float(inputs.sum()))

    check_fit(
        Plan(model="my:odd"),
        Odd(nn.Flatten(), nn.BatchNorm1d(48)),
        classification(48, (3, 4, 4)),
        Sharding(9, 2, 0, 0, 2),
        5,
    )


def test_images_too_small_for_a_model_are_refused() -> None:
    task = classification(10, (3, 16, 16))
    model = build_model("vgg11", seed=0, task=task)
    with pytest.raises(PlanError, match=r"vgg11 cannot process inputs of 3x16x16.*image_size"):
        check_fit(Plan(model="vgg11"), model, task, Sharding(10, 4, 0), 1)


def test_parts_and_statistics_over_the_global_batch_count() -> None:
    """Three samples per worker: too few in two parts, unless batch norm sees those of all workers."""
    task, sharding = classification(48, (3, 4, 4)), Sharding(60, 6, 0, 0, 2)
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(48))
    check_fit(Plan(model="my:model", global_batch=6), model, task, sharding, 10)
    with pytest.raises(PlanError, match="global batch 6 on 2 workers in 2 parts leaves a worker with 1 sample"):
        check_fit(Plan(model="my:model", global_batch=6, accumulate=2), model, task, sharding, 10)
    check_fit(Plan(model="my:model", global_batch=6, accumulate=2, batch_norm="sync"), model, task, sharding, 10)
