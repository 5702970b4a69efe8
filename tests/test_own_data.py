"""`--data module:callable`: a user's own datasets, loss and metric, wherever ranks run and however many they are."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from conftest import Cli
from torch import Tensor
from torch.utils.data import TensorDataset

import syncline
from syncline.errors import DataError, PlanError
from syncline.plan import Plan
from syncline.workload.data.own import Data, OwnBatches, own_batches
from syncline.workload.sharding import Shard, Sharding

MODULE = '''
import random

import numpy as np
import torch
from torch import nn

import syncline


class Points:
    """Augmented with all three generators."""

    classes = ["below", "above"]

    def __init__(self, count, shift=0):
        self.count, self.shift = count, shift

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        values = torch.sin(torch.arange(4.0) + 4 * number + self.shift)
        noise = 0.01 * (torch.rand(()) + random.random() + np.random.rand())
        return values + noise, int(values.sum() > 0)


def points():
    return Points(50), Points(9, 1000)


def loss(outputs, targets):
    return (outputs[:, 0] - targets.float()).square().mean()


def hit_rate(outputs, targets):
    return ((outputs[:, 0] > 0.5) == (targets > 0)).float().mean()


def asked(data_dir=None, seed=None):
    assert data_dir is not None and data_dir.is_absolute() and seed == 5000
    return syncline.Data(Points(50), Points(9, 1000), loss=loss, metric=hit_rate, num_classes=1)


def stream():
    return iter(())


class Net(nn.Module):
    def __init__(self, num_classes, input_shape):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(*input_shape, 8), nn.Tanh(), nn.Linear(8, num_classes))

    def forward(self, values):
        return self.layers(values)
'''
QUICK = ["--threads", "1", "--global-batch", "7", "--set", "measure.calibration=0"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "mine"
    made.mkdir()
    (made / "points_data.py").write_text(MODULE)
    return made


@pytest.fixture
def build(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., OwnBatches]:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "points_data", raising=False)
    return lambda name, **keys: own_batches(Plan(data=f"points_data:{name}", **keys))


def everything(*shards: Shard, batches: OwnBatches) -> tuple[Tensor, Tensor]:
    parts = [batches.train(shard) for shard in shards]
    return torch.cat([inputs for inputs, _ in parts]), torch.cat([targets for _, targets in parts])


def test_a_sample_follows_from_its_number_and_the_epoch_whoever_makes_it(build: Callable[..., OwnBatches]) -> None:
    batches = build("points")
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    whole = everything(next(Sharding(50, 11, 5).epoch(0)), batches=batches)
    for world_size in (2, 3):
        shards = [next(Sharding(50, 11, 5, rank, world_size).epoch(0)) for rank in range(world_size)]
        parts = everything(*shards, batches=batches)
        assert all(torch.equal(one, other) for one, other in zip(parts, whole, strict=True))
    again = next(Sharding(50, 11, 5).epoch(0))
    other_epoch = batches.train(Shard(1, again.step, again.indices, 11, 1))
    assert not torch.equal(other_epoch[0], whole[0])
    assert torch.equal(other_epoch[1], whole[1])
    assert not torch.equal(build("points", seed=1).train(again)[0], whole[0])
    assert len(batches.train(Shard(0, 0, np.zeros(0, np.int64), 1, 2))[0]) == 2, "stand-ins"
    assert torch.equal(batches.test(3, 20)[0], batches.test(3, 9)[0])
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(state[0], after[0])
    assert state[1:] == after[1:]
    assert batches.in_dtype(torch.float64).test(0, 1)[0].dtype == torch.float64


def test_what_is_asked_follows_from_the_data(build: Callable[..., OwnBatches], folder: Path) -> None:
    task = build("points").task
    assert (task.num_classes, task.input_shape, task.metric, task.unit) == (2, (4,), "accuracy", "samples")
    assert task.describe(3, 4) == "accuracy 75.00%"
    task = build("asked", data_dir=str(folder)).task
    outputs, targets = torch.tensor([[1.0], [0.0]]), torch.tensor([1, 1])
    assert task.loss(outputs, targets) == 0.5
    assert task.loss(outputs, targets, reduction="sum") == 1.0
    assert task.score_sum(outputs, targets) == 1.0
    assert task.describe(1.0, 2) == "hit rate 0.5"
    assert task.example(3).shape == (3, 4)


def made(data: Data) -> OwnBatches:
    return OwnBatches(data, name="x:y", seed=0, channels_last=True)


def test_targets_that_are_no_whole_numbers_are_a_regression() -> None:
    batches = made(Data(TensorDataset(torch.arange(20.0)[:, None], torch.arange(20.0))))
    task = batches.task
    assert (batches.num_train, batches.num_test) == (18, 2), "a tenth is kept for the test"
    seen = {*batches.train(Shard(0, 0, np.arange(18), 18, 1))[1].tolist(), *batches.test(0, 9)[1].tolist()}
    assert seen == set(range(20))
    outputs, targets = torch.tensor([[1.0], [3.0]]), torch.tensor([1.0, 1.0])
    assert (task.num_classes, task.metric) == (1, "mean_absolute_error")
    assert task.loss(outputs, targets) == 2.0
    assert task.score_sum(outputs, targets) == 2.0
    assert batches.source == "Your data x:y: 18 training and 2 test samples."


def test_samples_that_draw_nothing_are_fetched_at_once() -> None:
    class Rows(TensorDataset):
        fetched: ClassVar[list[list[int]]] = []

        def __getitems__(self, numbers: list[int]) -> list[Any]:
            self.fetched.append(numbers)
            return [self[number] for number in numbers]

    rows = Rows(torch.arange(20.0)[:, None], torch.arange(20.0))
    batches = made(Data(rows, rows, draws=False))
    shard = Shard(0, 0, np.array([3, 1, 2]), 3, 1)
    assert batches.train(shard)[1].tolist() == [3.0, 1.0, 2.0]
    assert Rows.fetched[-1] == [3, 1, 2]
    plain = made(Data(TensorDataset(*rows.tensors), draws=False))
    assert len(plain.train(shard)[0]) == 3


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (Data([(torch.ones(2), 1)] * 4), "does not say how many classes"),
        (Data([]), "too few samples"),
        (Data([(torch.ones(2), 1.0)] * 4, []), "too few samples"),
        (Data([{"x": torch.ones(2)}] * 4), "a batch of your data is a dict, not a pair of tensors"),
        (Data([(torch.ones(2), "cat")] * 4), "not a pair of tensors"),
    ],
    ids=["classes", "empty", "no test", "dictionaries", "words"],
)
def test_data_that_cannot_be_used_is_refused(data: Data, words: str) -> None:
    with pytest.raises(DataError, match=words):
        made(data)


def test_callables_that_cannot_be_used_are_refused(build: Callable[..., OwnBatches]) -> None:
    with pytest.raises(PlanError, match="cannot load data 'points_data:nobody'"):
        build("nobody")
    with pytest.raises(DataError, match="samples have no numbers"):
        build("stream")
    with pytest.raises(PlanError, match=r"data: unknown value 'cifar'.*module:callable"):
        syncline.load_plan(None, {"data": "cifar"})


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in json.loads((run / "summary.json").read_text())["losses"]]


def test_it_trains_the_same_on_any_number_of_workers_and_goes_on_from_elsewhere(
    cli: Cli, folder: Path, tmp_path: Path
) -> None:
    """With loaders, on emulated hosts, under the user's own loss; a run that was broken off is resumed elsewhere."""
    plan = ["--data", "points_data:points", "--model", "points_data:Net", "--epochs", "2", "--set", "log_every=1"]
    for name, options in {
        "one": ["--workers", "1", "--method", "single"],
        "three": ["--workers", "3", "--method", "bucketed", "--set", "loaders=1"],
        "hosts": ["--hosts", "2", "--link", "1gbit", "--method", "all-reduce"],
    }.items():
        done = cli("train", *plan, *QUICK, *options, "--run-dir", tmp_path / name, cwd=folder)
        assert done.returncode == 0, done.stderr
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    assert "samples/s" in done.stdout
    assert "accuracy" in done.stdout
    info = json.loads((tmp_path / "three" / "run.json").read_text())
    (tmp_path / "three" / "run.json").write_text(json.dumps({**info, "status": "stopped"}))
    resumed = cli("train", "--resume", tmp_path / "three")
    assert resumed.returncode == 0, resumed.stderr


def test_own_loss_and_metric_in_train_compare_and_data(cli: Cli, folder: Path) -> None:
    data = ["--data", "points_data:asked", "--data-dir", ".", "--model", "points_data:Net"]
    done = cli("train", *data, *QUICK, "--workers", "2", "--steps", "3", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "hit rate" in done.stdout
    compared = cli("compare", *data, *QUICK, "--methods", "ddp,bucketed", "--steps", "2", cwd=folder)
    assert compared.returncode == 0, compared.stderr
    assert "samples/s" in compared.stdout
    described = cli("data", "points_data:asked", "--data-dir", ".", cwd=folder)
    assert (
        "50 training and 9 test samples. Input and target: 4 float32 and one int64. Loss loss, metric hit_rate"
        in (described.stdout)
    )
    refused = cli("train", *data, *QUICK, "--recipe", "fast", cwd=folder)
    assert refused.returncode == 2
    assert "optimizer.label_smoothing=0" in refused.stderr
    missing = cli("train", "--data", "points_data:nobody", *QUICK, "--run-dir", "left", cwd=folder)
    assert missing.returncode == 2
    assert "cannot load data 'points_data:nobody'" in missing.stderr
    assert not (folder / "left").exists()
    useless = cli("train", *data, "--set", "image_size=32", cwd=folder)
    assert useless.returncode == 2
    assert "image_size 32" in useless.stderr


LAB = """
title = "Points"
question = "Which is fastest?"
answer = "fastest"
answer_stage = "time"
[plan]
model = "points_data:Net"
data = "points_data:points"
threads = 1
global_batch = 8
evaluate = false
"measure.calibration" = 0
[[stage]]
name = "time"
methods = ["all-reduce", "ddp"]
grid = { workers = [2] }
plan = { steps = 3, "measure.warmup" = 1 }
[[table]]
title = "Step time"
stage = "time"
values = ["step"]
main = true
"""


def test_a_lab_finds_the_data_beside_its_file(cli: Cli, folder: Path) -> None:
    (folder / "lab.toml").write_text(LAB)
    done = cli("lab", folder, "--out", folder / "out")
    assert done.returncode == 0, done.stderr
    assert (folder / "out" / "report" / "index.html").exists()
