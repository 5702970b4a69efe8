"""Calibration: bare compute, layer by layer; it leaves no trace, and what it writes can be replayed."""

from __future__ import annotations

import json
import math
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Cli
from helpers import on_threads, small_batches
from torch import Tensor, nn

from syncline.comm import Communicator
from syncline.launcher.here import run_ranks
from syncline.plan import Plan
from syncline.rank import joined
from syncline.spans import EventLog, read_log
from syncline.store import RunFolder, create_run
from syncline.sync import make_sync
from syncline.training import calibrate as module
from syncline.training.calibrate import (
    PHASES,
    REST,
    StepTimes,
    calibrate,
    compute_times,
    first_shards,
    gather_times,
    median_of,
)
from syncline.training.layer_updates import parameters_by_layer, timed_updates
from syncline.training.step import Worker
from syncline.workload.recorded import ComputeTimes
from syncline.workload.sharding import Sharding


class Net(nn.Module):
    """A layer that is called twice, one that never is, and one whose weight is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 10)
        self.unused = nn.Linear(2, 2)
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(3072, 8))
        self.twice = nn.BatchNorm1d(8)
        self.body[1].weight.requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        result: Tensor = self.last(self.twice(torch.relu(self.twice(self.body(images)))))
        return result


def live(num_steps: int = 2) -> Any:
    def on_rank(comm: Communicator, log: EventLog) -> tuple[list[StepTimes], ComputeTimes, EventLog]:
        model = Net()
        sync = make_sync("single", comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        worker = Worker(model, sync.attach(model), sync, optimizer, small_batches(), log)
        steps = calibrate(worker, Sharding(200, 6, 7, comm.rank, comm.world_size), num_steps, comm)
        times = gather_times(steps, model, comm, {"model": "mine", "samples": 3})
        assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())
        return steps, times, log

    return on_rank


def test_every_layer_and_gradient_of_every_rank_is_timed() -> None:
    found = on_threads(2, live())
    for steps, times, _ in found:
        assert len(steps) == times.steps == 2
        for step in steps:
            assert list(step.layers) == ["body.0", "body.1", "twice", "last"]
            assert set(step.ready) == {"last.weight", "last.bias", "twice.weight", "twice.bias", "body.1.bias"}
            assert max(step.ready.values()) == pytest.approx(step.phases["backward"])
            assert set(step.updates) == set(step.ready)
            assert step.phases["update"] > 0
        assert times == found[0][1]
    times = found[0][1]
    kinds = [layer.kind for layer in times.forward]
    assert kinds == ["Flatten", "Linear", "BatchNorm1d", "Linear", ""]
    assert {one.parameter for one in times.backward[:2]} == {"last.weight", "last.bias"}
    assert times.backward[-1].parameter == "body.1.bias"
    assert {one.parameter: one.shape for one in times.backward}["last.weight"] == (10, 8)
    assert [one.name for one in times.buffers] == [
        "twice.running_mean",
        "twice.running_var",
        "twice.num_batches_tracked",
    ]
    assert sum(one.update_s or 0.0 for one in times.backward) == pytest.approx(times.update_s, abs=1e-7)
    assert all(one.update_s for one in times.backward)
    assert [one.rank for one in times.ranks] == [0, 1]
    for one in times.ranks:
        assert one.forward_s > 0
        assert one.update_s > 0


def test_records_are_of_their_own_kind() -> None:
    for steps, _, log in on_threads(2, live(3)):
        assert {record["kind"] for record in log.records} == {"calibration", "collective"}
        assert {record["step"] for record in log.records} == {-1}
        own = [record for record in log.records if record["kind"] == "calibration"]
        assert [record["turn"] for record in own] == [0, 1, 2]
        assert [record["forward"] for record in own] == [round(step.phases["forward"] * 1e9) for step in steps]
        assert set(own[0]) >= set(PHASES)


def test_slow_model_is_not_held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step that was taken counts."""
    monkeypatch.setattr(module, "LONGEST_S", 0.0)
    assert [len(steps) for steps, _, _ in on_threads(2, live(3))] == [1, 1]


def test_one_late_rank_ends_it_for_all() -> None:
    def on_rank(comm: Communicator, _: EventLog) -> tuple[bool, bool]:
        started = -1e9 if comm.rank == 1 else time.monotonic()
        taken = [StepTimes({}, {}, {}, {})]
        return module._someone_is_late(comm, taken, started), module._someone_is_late(comm, [], started)

    assert on_threads(3, on_rank) == [(True, False)] * 3


def test_medians_over_ranks_in_the_order_of_readiness() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    trained = ["0.weight", "0.bias", "2.weight", "2.bias"]
    # data, forward, backward, rest, update; two layers and one never called; four moments, one without a gradient;
    # their updates.
    rows = [
        [1.0, 10.0, 20.0, 0.5, 4.0, 3.0, math.nan, 2.0, 20.0, 18.0, 6.0, math.nan, 1.0, 1.0, 2.0, math.nan],
        [3.0, 30.0, 40.0, 1.5, 6.0, 5.0, math.nan, 4.0, 40.0, 38.0, 8.0, math.nan, 1.0, 3.0, 9.0, math.nan],
        [2.0, 20.0, 30.0, 1.0, 5.0, 4.0, math.nan, 3.0, 30.0, 28.0, 7.0, math.nan, 1.0, 2.0, 7.0, math.nan],
    ]
    times = compute_times(model, ["0", "1", "2"], trained, ["2", "0"], rows, {"samples": 8})
    assert [(one.layer, one.kind, one.seconds) for one in times.forward] == [
        ("2", "Linear", 3.0), ("0", "Linear", 4.0), (REST, "", 13.0)
    ]  # fmt: skip
    assert [(one.parameter, one.seconds) for one in times.backward] == [
        ("2.weight", 7.0), ("0.bias", 21.0), ("0.weight", 2.0)
    ]  # fmt: skip
    # 7, 2 and 1 of the median update, 5.
    assert [one.update_s for one in times.backward] == [3.5, 1.0, 0.5]
    assert (times.data_s, times.update_s, times.forward_s, times.backward_s) == (2.0, 5.0, 20.0, 31.0)
    assert [(one.forward_s, one.backward_s) for one in times.ranks] == [(10.0, 20.5), (30.0, 41.5), (20.0, 31.0)]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_updates_are_timed_layer_by_layer_and_leave_the_weights(kind: type[torch.optim.Optimizer]) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1), nn.Linear(1, 1))
    optimizer = kind(model.parameters(), lr=0.1, weight_decay=0.1)  # type: ignore[call-arg]
    model[:3](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    layers = parameters_by_layer(model)
    assert [list(layer) for layer in layers] == [[f"{n}.weight", f"{n}.bias"] for n in (0, 2, 3)]
    seconds = timed_updates(optimizer, layers)
    assert set(seconds) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert seconds["0.weight"] == pytest.approx(2 * seconds["0.bias"])  # one layer's time, by size
    assert [torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True)] == [True] * 6
    assert [group["lr"] for group in optimizer.param_groups] == [0.1]


def test_shards_are_of_whole_batches_from_as_many_epochs_as_it_takes() -> None:
    found = list(first_shards(Sharding(10, 4, 0, 1, 2), 5))
    assert [(shard.epoch, shard.step, shard.num_global) for shard in found] == [
        (0, 0, 4), (0, 1, 4), (1, 0, 4), (1, 1, 4), (2, 0, 4)
    ]  # fmt: skip
    assert [shard.num_global for shard in first_shards(Sharding(3, 4, 0), 2)] == [3, 3]


def test_median_of_nothing_is_nothing() -> None:
    assert math.isnan(median_of([None, math.nan]))
    assert median_of([None, 3.0, math.nan, 1.0]) == 2.0


def digests(plans: list[Plan], folder: str, user_folder: str) -> list[str]:
    """A rank's part: the same training with and without calibration, in one world."""
    from syncline import worker
    from syncline.comm.torch_backend import connect
    from syncline.launcher.adopt import placement_from_environment
    from syncline.voice import Voice

    place = placement_from_environment()
    assert place is not None
    sys.path.insert(0, user_folder)
    world = connect(place, backend="gloo", deadline=timedelta(seconds=60))
    found = []
    for plan in plans:
        number = plan.measure.calibration
        run = RunFolder(Path(folder) / f"run-{number}")
        with joined(plan, run.path / "events", world.split(str(number))) as rank:
            summary = worker._train(rank, run, resume=False, voice=Voice())
        found.append(summary["weights_sha256"] if summary else "")
    world.close()
    return found


def test_calibrated_run_learns_the_same_and_can_be_replayed(cli: Cli, tmp_path: Path, user_folder: Path) -> None:
    """Batch norm and dropout: random numbers are drawn, buffers change, and nothing of it is left."""
    common = {"model": "user_model:Net", "data": "synthetic", "workers": 2, "threads": 1, "global_batch": 12}
    plans = [
        Plan(**common, method="ddp", steps=3, evaluate=False, measure={"calibration": number})  # type: ignore[arg-type]
        for number in (0, 2)
    ]
    work = tmp_path / "work"
    for plan in plans:
        create_run(work / f"run-{plan.measure.calibration}", kind="train", plan=plan, label="")
    arguments = (plans, str(work), str(user_folder))
    without, calibrated = run_ranks(digests, arguments, workers=2, log_dir=tmp_path / "logs", threads=1)[0]
    assert without == calibrated
    assert not (work / "run-0" / "compute.json").exists()
    for rank in range(2):
        records = read_log(RunFolder(work / "run-2").events(rank))
        assert sum(record["kind"] == "calibration" for record in records) == 2
        assert [record["step"] for record in records if record["kind"] == "step"] == [0, 1, 2]
    done = cli("train", "--compute", "replay:run-2", "--workers", 3, "--steps", 2, "--run-dir", "again", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["compute"] == "replayed from run-2"
    assert RunFolder(work / "again").plan().global_batch == 18
    assert (work / "again" / "compute.json").read_text() == (work / "run-2" / "compute.json").read_text()
