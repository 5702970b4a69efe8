"""Training end to end: what a run records, and that a run which was interrupted ends where it would have ended."""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from conftest import Cli, cli_environment

from syncline.launcher.here import run_ranks
from syncline.methods import METHODS
from syncline.plan import Plan
from syncline.rank import joined
from syncline.spans import read_log
from syncline.store import RunFolder, create_run

PHASES = {"data", "forward", "backward", "sync", "update"}
SENDING = [name for name, row in METHODS.items() if row.takes_turns and not row.alone]
"""auto is one of the others, and mpi has a world of its own."""


def trained(cli: Cli, *arguments: object, **extra: str) -> dict[str, Any]:
    done = cli("train", "--data", "synthetic", *arguments, "--json", **extra)
    assert done.returncode == 0, done.stderr
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


def test_summary_and_event_logs_hold_losses_and_phases_of_every_step_and_rank(cli: Cli, tmp_path: Path) -> None:
    """41 steps of 33 samples on two workers: shards are uneven."""
    arguments = ("--model", "cnn", "--workers", 2, "--global-batch", 33, "--steps", 41, "--eval-per-rank")
    summary = trained(cli, *arguments, "--run-dir", "run")
    assert [line["step"] for line in summary["losses"]] == [20, 40]
    assert (summary["steps"], summary["timed_steps"], summary["step"]["counted"]) == (41, 41, 40)
    assert summary["images_per_s"] > 0
    (epoch,) = summary["epochs"]
    assert epoch["steps"] == 41
    assert epoch["test_images"] == 2000
    assert epoch["test_accuracy"] == epoch["test_correct"] / 2000
    # This model has no batch norm, so each rank alone measures what all measure together.
    assert [own["correct"] for own in epoch["test_per_rank"]] == [epoch["test_correct"]] * 2

    run = RunFolder(tmp_path / "work" / "run")
    assert run.summary() == {key: value for key, value in summary.items() if key != "run"}
    assert run.info()["status"] == "finished"
    logs = [read_log(run.events(rank)) for rank in range(2)]
    losses = [{record["step"]: record for record in log if record["kind"] == "loss"} for log in logs]
    assert [sorted(of_rank) for of_rank in losses] == [list(range(41))] * 2
    for step in range(41):
        assert losses[0][step]["samples"] + losses[1][step]["samples"] == 33
        for log in logs:
            names = {record["name"] for record in log if record["kind"] == "phase" and record["step"] == step}
            assert names >= PHASES
    for line in summary["losses"]:
        own = [of_rank[line["step"] - 1] for of_rank in losses]
        assert line["by_rank"] == pytest.approx([record["value"] for record in own])
        assert line["loss"] == pytest.approx(sum(record["value"] * record["samples"] for record in own) / 33)


def test_loss_lines_and_figures_are_printed(cli: Cli) -> None:
    arguments = ("--model", "mlp", "--data", "synthetic", "--workers", 2, "--steps", 20, "--global-batch", 20)
    done = cli("train", *arguments, "--run-dir", "run")
    assert done.returncode == 0, done.stderr
    text = done.stdout
    for words in ("20/20  loss ", "training loss ", "test loss ", "/2000)", "average step ", "first 1 discarded"):
        assert words in text, text
    assert done.stderr == ""


def test_any_number_of_workers_learns_the_same_and_counts_every_test_image(cli: Cli) -> None:
    """Not bit for bit: sums run in another order. But the batches and the maths are the same."""
    arguments = ("--model", "cnn", "--global-batch", 60, "--steps", 30)
    epochs = [trained(cli, *arguments, "--workers", n, "--run-dir", n)["epochs"][0] for n in (1, 2, 3)]
    assert [epoch["test_images"] for epoch in epochs] == [2000] * 3
    for epoch in epochs[1:]:
        assert epoch["train_loss"] == pytest.approx(epochs[0]["train_loss"], rel=1e-3)
        assert epoch["test_correct"] == pytest.approx(epochs[0]["test_correct"], abs=40)


def torchrun(workers: int, *arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(workers)]
    # Without a folder of ours torchrun leaves one of its own behind.
    command = [*launcher, "--log-dir", str(cwd / "logs"), "-m", "syncline.worker", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=cli_environment())


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.toml"
    values = {"model": "cnn", "data": "synthetic", "workers": 2, "global_batch": 9, "steps": 6, "evaluate": False}
    path.write_text(Plan(**values).to_toml())  # type: ignore[arg-type]
    return path


def test_torchrun_trains_the_same_plan_to_the_same_weights(plan_file: Path, cli: Cli, tmp_path: Path) -> None:
    done = torchrun(2, plan_file, "--run-dir", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    here = json.loads(cli("train", plan_file, "--json").stdout)
    run = RunFolder(tmp_path / "run")
    there = run.summary()
    assert there is not None
    assert there["weights_sha256"] == here["weights_sha256"]
    assert run.info()["status"] == "finished"
    assert all(read_log(run.events(rank)) for rank in range(2))


def test_plan_for_another_number_of_workers_is_refused_under_torchrun(plan_file: Path, tmp_path: Path) -> None:
    done = torchrun(1, plan_file, "--run-dir", "run", cwd=tmp_path)
    assert done.returncode != 0
    assert "syncline: the plan needs 2 ranks, but torchrun started 1." in done.stderr
    assert not (tmp_path / "run").exists()


def digests_when_interrupted(plans: list[Plan], folder: str, user_folder: str, stop_at: int) -> dict[str, list[str]]:
    """A rank's part: each plan once through, and once stopped after a step and resumed; weights of both, by method.

    Every run gets communicators of its own, as if it were the only one in its process.
    """
    from syncline import worker
    from syncline.comm.torch_backend import connect
    from syncline.launcher.adopt import placement_from_environment
    from syncline.voice import Voice

    class Stopped(Exception):
        pass

    class Stopping(worker.Display):
        def step(self, step: int, total: int, loss: float, images_per_s: float) -> None:
            if step == stop_at:
                raise Stopped

    place = placement_from_environment()
    assert place is not None
    sys.path.insert(0, user_folder)
    worker.load_images = functools.cache(worker.load_images)  # type: ignore[assignment]
    show = worker.Display
    deadline = timedelta(seconds=60)
    world = connect(place, backend="gloo", deadline=deadline)

    def train(plan: Plan, name: str, *, resume: bool) -> str:
        run = RunFolder(Path(folder) / f"{plan.method}-{name}")
        backend = world.split(f"{plan.method} {name} {resume}")
        with joined(plan, None, backend) as rank:
            summary = worker._train(rank, run, resume=resume, voice=Voice())
        if summary is None:
            return ""
        run.write_summary(summary)
        return str(summary["weights_sha256"])

    found = {}
    for plan in plans:
        whole = train(plan, "whole", resume=False)
        worker.Display = Stopping  # type: ignore[misc]
        with contextlib.suppress(Stopped):
            train(plan, "broken", resume=False)
        worker.Display = show  # type: ignore[misc]
        found[plan.method] = [whole, train(plan, "broken", resume=True), train(plan, "whole", resume=True)]
    world.close()
    return found


@pytest.mark.parametrize("workers", [2, 3])
def test_interrupted_run_of_every_method_resumes_bit_for_bit(workers: int, tmp_path: Path, user_folder: Path) -> None:
    """Batch norm, dropout and an uneven batch; stopped two steps after a checkpoint in the middle of an epoch."""
    common = {"model": "user_model:Net", "data": "synthetic", "workers": workers, "threads": 1}
    length = {"global_batch": 6 * workers + 1, "steps": 9, "checkpoint": {"every": 3}, "evaluate": False}
    no_barrier = {name: {"barrier": False} for name, row in METHODS.items() if "barrier" in row.options}
    plans = [
        Plan(**common, **length, method=method, options=no_barrier.get(method, {}))  # type: ignore[arg-type]
        for method in SENDING
    ]
    for plan in plans:
        for name in ("whole", "broken"):
            create_run(tmp_path / "runs" / f"{plan.method}-{name}", kind="train", plan=plan, label="")
    arguments = (plans, str(tmp_path / "runs"), str(user_folder), 8)
    found = run_ranks(digests_when_interrupted, arguments, workers=workers, log_dir=tmp_path / "logs", threads=1)[0]
    assert list(found) == SENDING
    for method, (whole, resumed, again) in found.items():
        assert whole == resumed, method
        assert whole == again, method


@pytest.mark.parametrize(
    ("recipe", "optimizer"),
    [("course", {}), ("fast", {}), ("fast", {"name": "adamw", "clip_norm": 0.5}), ("default", {"name": "adam"})],
)
def test_run_over_two_epochs_resumes_bit_for_bit_with_every_figure(
    recipe: str, optimizer: dict[str, object], tmp_path: Path, user_folder: Path
) -> None:
    """Five steps an epoch; stopped in the second one. What was measured before the stop is in the summary too."""
    plan = Plan(
        model="mlp", data="synthetic", workers=2, threads=1, global_batch=2000, epochs=2, log_every=2, method="ddp",
        recipe=recipe, optimizer=optimizer, checkpoint={"every": 2},  # type: ignore[arg-type]
    )  # fmt: skip
    names = ("ddp-whole", "ddp-broken")
    runs = [create_run(tmp_path / "runs" / name, kind="train", plan=plan, label="") for name in names]
    arguments = ([plan], str(tmp_path / "runs"), str(user_folder), 8)
    run_ranks(digests_when_interrupted, arguments, workers=2, log_dir=tmp_path / "logs", threads=1)
    whole, resumed = (run.summary() for run in runs)
    assert whole is not None
    assert resumed is not None
    for key in ("weights_sha256", "losses", "epochs", "steps"):
        assert whole[key] == resumed[key], key
    assert [epoch["steps"] for epoch in whole["epochs"]] == [5, 5]
