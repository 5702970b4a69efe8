"""Replayed compute: what is slept, in which order gradients become ready, that they travel, and what is refused."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Cli
from helpers import ON_THREADS, on_processes, on_threads
from torch import Tensor

from syncline.accounting.breakdown import break_down
from syncline.comm import Communicator
from syncline.errors import PlanError
from syncline.events import read_events
from syncline.plan import Plan, parse_plan
from syncline.resolve import resolve
from syncline.spans import EventLog, read_log
from syncline.store import RunFolder
from syncline.sync import make_sync
from syncline.training.step import Worker, train_step
from syncline.workload import replay
from syncline.workload.recorded import ComputeTimes, load_times
from syncline.workload.replay import ReplayedBatches, ReplayedModel, ReplayedOptimizer, Timeline
from syncline.workload.sharding import Sharding

STATED = """
data_ms = 2
update_ms = 10

[[layers]]
name = "type"                   # a name that nn.Module uses itself
forward_ms = 20
backward_ms = 40
shapes = [[5, 3], [5]]

[[layers]]
name = "pool"
forward_ms = 4
backward_ms = 6

[[layers]]
name = "out.linear"
forward_ms = 1
backward_ms = 8
shapes = [[7]]
"""
SHAPES = {"type.0": (5, 3), "type.1": (5,), "out.linear.0": (7,)}


@pytest.fixture
def stated(tmp_path: Path) -> Path:
    path = tmp_path / "times.toml"
    path.write_text(STATED)
    return path


def times_of(path: Path) -> ComputeTimes:
    return load_times(f"sleep:{path}")


def test_stated_layers_are_slept_backwards_and_a_layer_without_parameters_delays_the_next(stated: Path) -> None:
    times = times_of(stated)
    assert [(one.layer, one.seconds) for one in times.forward] == [
        ("type", 0.02),
        ("pool", 0.004),
        ("out.linear", 0.001),
    ]
    found = [(one.parameter, one.shape, one.seconds) for one in times.backward]
    assert found == [("out.linear.0", (7,), 0.008), ("type.1", (5,), 0.046), ("type.0", (5, 3), 0.0)]
    assert (times.data_s, times.update_s, times.backward_rest_s) == (0.002, 0.01, 0.0)
    assert times.step_s == pytest.approx(0.002 + 0.025 + 0.054 + 0.01)
    assert times.gradient_bytes == 4 * (15 + 5 + 7)


def test_first_layer_without_parameters_ends_backward(tmp_path: Path) -> None:
    path = tmp_path / "times.toml"
    path.write_text("[[layers]]\nname='a'\nbackward_ms=3\n[[layers]]\nname='b'\nbackward_ms=4\nshapes=[[1]]\n")
    times = times_of(path)
    assert (times.backward_s, times.backward_rest_s) == (pytest.approx(0.007), 0.003)


def test_recorded_file_survives_writing_and_reading(stated: Path, tmp_path: Path) -> None:
    times = times_of(stated).model_copy(update={"model": "cnn", "samples": 4})
    (tmp_path / "compute.json").write_text(times.to_json())
    assert load_times(f"replay:{tmp_path}") == load_times(f"replay:{tmp_path / 'compute.json'}") == times


GOOD = {"forward": [], "backward": [{"parameter": "a", "shape": [1], "seconds": 0}]}


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("replay:missing", "", ["missing", "No such file"]),
        ("replay:.", None, ["holds no recorded compute times", "measure.calibration"]),
        ("replay:compute.json", "{", ["compute.json", "JSON"]),
        ("replay:compute.json", "[]", ["compute.json", "does not hold"]),
        ("replay:compute.json", json.dumps({**GOOD, "format": 3}), ["format 3", "reads up to 2"]),
        ("replay:compute.json", json.dumps({**GOOD, "backward": []}), ["compute.json", "backward"]),
        ("replay:compute.json", json.dumps({**GOOD, "backword": []}), ["compute.json", "'backword'"]),
        ("replay:compute.json", json.dumps({**GOOD, "backward": GOOD["backward"] * 2}), ["a appears twice"]),
        ("sleep:times.toml", "layers =", ["times.toml", "TOML"]),
        ("sleep:times.toml", "data_ms = 1", ["times.toml", "layers"]),
        ("sleep:times.toml", "[[layers]]\nname='a'", ["times.toml", "no layer has shapes"]),
        ("sleep:times.toml", "[[layers]]\nname='a'\nshapes=[[0]]", ["times.toml", "0"]),
        ("sleep:times.toml", "[[layers]]\nname='a'\nforward_ms=-1", ["times.toml", "layers.0.forward_ms"]),
    ],
)
def test_wrong_file_is_refused(
    name: str, content: str | None, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if content:
        Path(name.partition(":")[2]).write_text(content)
    with pytest.raises(PlanError) as error:
        load_times(name)
    assert [word for word in words if word not in str(error.value)] == []


# Sleeping, on a clock of the test's own.


class Clock:
    """A clock on which only sleeping takes time; every sleep overshoots."""

    def __init__(self, overshoot_ns: int) -> None:
        self.now = 5_000_000_000
        self.overshoot_ns = overshoot_ns
        self.sleeps = 0

    def sleep(self, seconds: float) -> None:
        self.now += round(seconds * 1e9) + self.overshoot_ns
        self.sleeps += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(60_000)
    monkeypatch.setattr(replay, "time", SimpleNamespace(monotonic_ns=lambda: clock.now, sleep=clock.sleep))
    return clock


def test_errors_of_sleeping_do_not_add_up_and_other_work_does(clock: Clock) -> None:
    timeline, start = Timeline(), clock.now
    for _ in range(100):
        timeline.sleep(0.001)
        clock.now += 500_000  # what a method does between two layers
    assert clock.now - start == 100 * 1_500_000 + clock.overshoot_ns


def test_many_short_sleeps_become_few_and_last_as_long(clock: Clock) -> None:
    timeline, start = Timeline(), clock.now
    for _ in range(1000):
        timeline.sleep(10e-6)
    assert abs(clock.now - start - 10_000_000) <= replay.SHORTEST_SLEEP_NS
    assert clock.sleeps < 110


def test_restart_forgets_a_stall(clock: Clock) -> None:
    timeline = Timeline()
    clock.overshoot_ns = 50_000_000
    timeline.sleep(0.001)
    clock.overshoot_ns = 0
    timeline.restart()
    start = clock.now
    timeline.sleep(0.001)
    assert clock.now - start == 1_000_000


def test_a_step_sleeps_every_part_and_gradients_become_ready_in_order(stated: Path, clock: Clock) -> None:
    clock.overshoot_ns = 0
    times = times_of(stated)
    model = ReplayedModel(times)
    ready: list[tuple[str, float]] = []
    start = clock.now
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _, name=name: ready.append((name, round((clock.now - start) / 1e6, 3)))  # type: ignore[misc]
        )
    ReplayedBatches(times.data_s).train(next(Sharding(4, 2, 0).epoch(0)))
    loss = model(torch.zeros(1)).sum()
    assert clock.now - start == 27_000_000
    loss.backward()
    assert ready == [("out.linear.0", 35.0), ("type.1", 81.0), ("type.0", 81.0)]
    optimizer = ReplayedOptimizer(model)
    optimizer.step()
    assert clock.now - start == 91_000_000
    assert not optimizer.state


def test_gradients_are_not_copied_and_weights_share_memory(stated: Path, clock: Clock) -> None:
    model = ReplayedModel(times_of(stated))
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == SHAPES
    places = set()
    for _ in range(2):
        model(torch.zeros(1)).sum().backward()
        places.add(tuple(p.grad.data_ptr() for p in model.parameters() if p.grad is not None))
        ReplayedOptimizer(model).zero_grad()
    assert len(places) == 1
    assert len({p.data_ptr() for p in model.parameters()}) == 1


def step_of(method: str, times: ComputeTimes, comm: Communicator, log: EventLog) -> dict[str, Tensor]:
    model = ReplayedModel(times)
    sync = make_sync(method, comm, log=log)
    optimizer = ReplayedOptimizer(model)
    worker = Worker(model, sync.attach(model), sync, optimizer, ReplayedBatches(times.data_s), log)
    shard = next(Sharding(8, 2 * comm.world_size, 0, comm.rank, comm.world_size).epoch(0))
    for _ in range(3):
        train_step(worker, shard)
    means: dict[str, Tensor] = {}
    optimizer.zero_grad = lambda: means.update(  # type: ignore[assignment, method-assign]
        {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    )
    train_step(worker, shard)
    sync.detach()
    return means


def assert_travelled(means: dict[str, Tensor], log: EventLog) -> None:
    assert {name: tuple(mean.shape) for name, mean in means.items()} == SHAPES
    assert all(bool((mean == 1).all()) for mean in means.values())
    sent = sum(record["bytes"] for record in log.records if record["kind"] == "collective")
    assert sent >= 4 * 4 * 27


@pytest.mark.parametrize("method", ON_THREADS)
def test_gradients_travel_through_every_method(method: str, stated: Path) -> None:
    times = times_of(stated)
    found = on_threads(3, lambda comm, log: (step_of(method, times, comm, log), log))
    for means, log in found:
        assert_travelled(means, log)


def ahead_steps(times: ComputeTimes, comm: Communicator, log: EventLog) -> list[str]:
    """What is slept in the last of four steps, in order."""
    model, slept = ReplayedModel(times), list[str]()
    names = {parameter: name for name, parameter in model.named_parameters()}
    modules = {module: name for name, module in model.named_modules()}
    sleep_update = model.sleep_update

    def update(parameters: Iterable[Tensor]) -> None:
        own = list(parameters)
        slept.append(f"update {' '.join(names[parameter] for parameter in own)}")
        sleep_update(own)

    model.sleep_update = update  # type: ignore[method-assign]
    for module, name in modules.items():
        module.register_forward_hook(lambda *_, name=name: slept.append(f"forward {name}"))  # type: ignore[misc]
    sync = make_sync("ahead", comm, log=log, barrier=False)
    worker = Worker(model, sync.attach(model), sync, ReplayedOptimizer(model), ReplayedBatches(times.data_s), log)
    shard = next(Sharding(8, 2 * comm.world_size, 0, comm.rank, comm.world_size).epoch(0))
    for log.step in range(4):
        slept.clear()
        start_ns = time.monotonic_ns()
        train_step(worker, shard)
        log.add("step", start=start_ns, end=time.monotonic_ns())
    last = list(slept)
    sync.detach()
    return last


def test_ahead_sleeps_a_layer_s_update_at_its_next_call(stated: Path) -> None:
    times = times_of(stated)
    for slept in on_threads(2, lambda comm, log: ahead_steps(times, comm, log)):
        assert slept == [
            "update type.0 type.1", "forward type", "forward pool",
            "forward out", "update out.linear.0", "forward out.linear", "forward ",
            "update ",  # the optimiser's own step
        ]  # fmt: skip


def test_parts_of_a_replayed_ahead_add_up_and_updates_inside_forward_are_updates(
    stated: Path, tmp_path: Path
) -> None:
    times = times_of(stated)

    def on_rank(comm: Communicator, log: EventLog) -> None:
        ahead_steps(times, comm, log)
        written = EventLog(tmp_path / "events" / f"rank-{comm.rank}.jsonl", rank=comm.rank, world_size=2)
        written.records += log.records
        written.close()

    on_threads(2, on_rank)
    for step in read_events(tmp_path).complete("")[2:]:
        for own in break_down(step).values():
            assert sum(own.parts.values()) == own.duration
            assert min(own.parts.values()) >= 0
            # Slept, so never less; but what one sleep takes too long, the next takes less.
            assert own.parts["update"] > 0
            assert own.parts["update"] + own.parts["forward"] >= 33_000_000


def test_update_is_shared_out_as_recorded_and_by_size_where_it_was_not(stated: Path) -> None:
    by_size = times_of(stated)
    sizes = {"out.linear.0": 7, "type.1": 5, "type.0": 15}
    assert by_size.updates_s == pytest.approx({name: 0.01 * size / 27 for name, size in sizes.items()})
    own = [one.model_copy(update={"update_s": part}) for one, part in zip(by_size.backward, (3, 0, 1), strict=True)]
    recorded = by_size.model_copy(update={"backward": tuple(own)})
    assert recorded.updates_s == pytest.approx({"out.linear.0": 0.0075, "type.1": 0.0, "type.0": 0.0025})


def test_recording_of_before_updates_were_recorded_is_read(tmp_path: Path) -> None:
    (tmp_path / "compute.json").write_text(json.dumps({**GOOD, "format": 1, "update_s": 0.5}))
    assert load_times(f"replay:{tmp_path}").updates_s == {"a": 0.5}


def test_model_of_one_layer_is_replayed(clock: Clock) -> None:
    forward, backward = [{"layer": "", "seconds": 0.001}], [{"parameter": "weight", "shape": [2], "seconds": 0.002}]
    model = ReplayedModel(ComputeTimes.model_validate({"forward": forward, "backward": backward}))
    clock.overshoot_ns, start = 0, clock.now
    model(torch.zeros(1)).sum().backward()
    assert clock.now - start == 3_000_000


def ddp_step(comm: Communicator, log: EventLog) -> dict[str, Tensor]:
    gradients = [{"parameter": name, "shape": shape, "seconds": 0.001} for name, shape in SHAPES.items()]
    buffers = [{"name": "type.running_mean", "shape": [3]}]
    times = ComputeTimes.model_validate({"forward": [], "backward": gradients, "buffers": buffers})
    means = step_of("ddp", times, comm, log)
    assert_travelled(means, log)
    return means


def test_gradients_travel_through_torch_s_ddp() -> None:
    assert len(on_processes(2, ddp_step)) == 2


# Plans and the command line.


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"compute": "reply:x"}, ["'reply:x'", "replay:RUN"]),
        ({"compute": "replay:"}, ["'replay:'"]),
        ({"compute": "replay:x", "checkpoint": {"every": 2}}, ["checkpoint.every"]),
        ({"compute": "replay:x", "eval_per_rank": True}, ["eval_per_rank"]),
        ({"compute": "replay:x", "device": "cuda"}, ["device cpu"]),
    ],
)
def test_plan_that_makes_no_sense_is_refused(values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(PlanError) as error:
        parse_plan(values)
    assert [word for word in words if word not in str(error.value)] == []


def recorded(folder: Path) -> Path:
    values = {**GOOD, "model": "mlp", "samples": 16, "num_train": 320}
    (folder / "compute.json").write_text(json.dumps(values))
    return folder


def test_recorded_batch_and_model_fill_the_plan_and_no_data_is_looked_for(tmp_path: Path) -> None:
    given = Plan(compute=f"replay:{recorded(tmp_path)}", workers=3, data="cifar10", data_dir="/nowhere")
    plan, sentence = resolve(given, ranks_per_host=3)
    assert (plan.model, plan.global_batch, plan.evaluate, plan.threads) == ("mlp", 48, False, 1)
    assert plan.compute_note == f"replayed from {tmp_path.name}"
    assert plan.compute_note in sentence
    assert resolve(plan, ranks_per_host=3)[0] == plan
    with pytest.raises(PlanError, match=r"global_batch is 64, .* 16 samples per worker, which makes 48 on 3"):
        resolve(Plan(compute=given.compute, workers=3, global_batch=64), ranks_per_host=3)


def test_replayed_training_is_marked_everywhere_and_keeps_nothing_of_learning(
    stated: Path, cli: Cli, tmp_path: Path
) -> None:
    arguments = ("--compute", f"sleep:{stated}", "--workers", 2, "--steps", 3, "--method", "bucketed")
    done = cli("train", *arguments, "--run-dir", "run", "--set", "log_every=2")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.count("stated in times.toml") == 3
    assert "loss" not in done.stdout
    run = RunFolder(tmp_path / "work" / "run")
    summary = run.summary()
    assert summary is not None
    assert summary["compute"] == "stated in times.toml"
    assert (summary["losses"], summary["epochs"], summary["weights_sha256"]) == ([], [], None)
    assert not run.checkpoints.exists()
    assert run.plan().replayed
    kinds = {record["kind"] for record in read_log(run.events(1))}
    assert {"phase", "step", "collective"} <= kinds
    assert "loss" not in kinds
    run.set_status("stopped")
    refused = cli("train", "--resume", "run")
    assert (refused.returncode, "replayed" in refused.stderr) == (2, True)


def test_replayed_comparison_leaves_single_out(stated: Path, cli: Cli) -> None:
    arguments = ("compare", "--compute", f"sleep:{stated}", "--workers", 3, "--steps", 2)
    done = cli(*arguments, "--methods", "single,ddp,bucketed", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["compute"] == "stated in times.toml"
    assert [(row["label"], row["loss"]) for row in document["rows"]] == [("ddp", None), ("bucketed", None)]
    refused = cli("compare", "--compute", f"sleep:{stated}", "--workers", 1, "--methods", "single")
    assert (refused.returncode, "one worker's share" in refused.stderr) == (2, True)
