"""Checkpoints that cannot be gone on from. That runs go on from good ones to the bit: test_training, test_faults."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import on_threads
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_step import make_worker, shard_of, state

from syncline.comm import Communicator
from syncline.errors import RunFolderError
from syncline.folders import LocalFolder
from syncline.plan import Plan
from syncline.spans import EventLog
from syncline.store import RunFolder
from syncline.training import checkpoint, evaluate
from syncline.training.checkpoint import Progress
from syncline.training.loop import Loop
from syncline.training.manifest import NAME, find_checkpoints, rank_file
from syncline.training.step import train_step
from syncline.workload.sharding import Sharding

PLAN = Plan(model="mlp", data="synthetic", method="bucketed", steps=9, global_batch=8)
NEWEST, OLDER = "step-00000003", "step-00000002"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """Checkpoints of two ranks after each of three steps, and the weights at the end."""
    folder = tmp_path_factory.mktemp("checkpoints")

    def live(comm: Communicator, log: EventLog) -> dict[str, torch.Tensor]:
        worker = make_worker("batch norm", "bucketed", comm, log)
        for step in range(3):
            train_step(worker, shard_of(comm, 8, step))
            checkpoint.save(LocalFolder(folder), PLAN, worker, Progress(step=step + 1, step_in_epoch=step + 1), comm)
        return state(worker.model)

    return folder, on_threads(2, live)[0]


@pytest.fixture
def folder(written: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> Path:
    return shutil.copytree(written[0], tmp_path / "checkpoints")


def loaded(
    folder: Path, plan: Plan = PLAN, *, model: str = "batch norm", workers: int = 2, said: list[str] | None = None
) -> list[tuple[Progress, dict[str, torch.Tensor]] | RunFolderError]:
    """Every rank's progress and weights, or its error."""

    def live(comm: Communicator, log: EventLog) -> tuple[Progress, dict[str, torch.Tensor]] | RunFolderError:
        worker = make_worker(model, "bucketed", comm, log)
        try:
            found = checkpoint.load(
                LocalFolder(folder), plan, worker, comm, say=(said if said is not None else []).append
            )
        except RunFolderError as error:
            return error
        return found, state(worker.model)

    return on_threads(workers, live)


def refusal(folder: Path, plan: Plan = PLAN, **about: Any) -> str:
    """What every rank says, and all the same."""
    errors = {str(found) for found in loaded(folder, plan, **about) if isinstance(found, RunFolderError)}
    assert len(errors) == 1
    assert errors != {""}
    return errors.pop()


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = torch.load(path, weights_only=True)
    change(content)
    torch.save(content, path)


def as_earlier_version(folder: Path) -> None:
    for path in folder.glob("step-*"):
        (path / NAME).unlink()
        for rank in (0, 1):
            edit(rank_file(path, rank), lambda content: content.update(format=checkpoint.WITHOUT_DIGESTS))


def first_weight(content: dict[str, Any]) -> torch.Tensor:
    return next(iter(content["parameters"].values())).data.view(-1)  # type: ignore[no-any-return]


def test_newest_two_are_kept_and_the_newest_is_loaded(
    folder: Path, written: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    assert sorted(path.name for path in folder.iterdir()) == [OLDER, NEWEST]
    for found in loaded(folder):
        assert not isinstance(found, RunFolderError)
        assert found[0].step == 3
    weights = loaded(folder)[0][1]  # type: ignore[index]
    for name, tensor in written[1].items():
        assert torch.equal(weights[name], tensor), name


@pytest.mark.parametrize("rank", [0, 1])
def test_flipped_bit_is_refused_by_all_ranks_and_the_good_checkpoint_is_offered(folder: Path, rank: int) -> None:
    path = rank_file(folder / NEWEST, rank)
    for place in (0.3, 0.6, 0.97):
        content = bytearray(path.read_bytes())
        content[int(place * len(content))] ^= 4
        path.write_bytes(content)
        message = refusal(folder)
        assert f"rank-{rank}.pt is damaged: it does not match its digest." in message
        assert f"To continue from {OLDER}, the newest good one, remove {folder / NEWEST}." in message
    shutil.rmtree(folder / NEWEST)
    assert [found[0].step for found in loaded(folder)] == [2, 2]  # type: ignore[index]


DAMAGES: dict[str, Callable[[Path], object]] = {
    "NaN": lambda path: edit(rank_file(path, 0), lambda content: first_weight(content)[0].fill_(float("nan"))),
    "another value": lambda path: edit(rank_file(path, 0), lambda content: first_weight(content)[0].add_(0.001)),
    "rank 1's is rank 0's": lambda path: shutil.copy(rank_file(path, 0), rank_file(path, 1)),
    "rank 1's is older": lambda path: shutil.copy(rank_file(path.with_name(OLDER), 1), rank_file(path, 1)),
    "missing": lambda path: rank_file(path, 1).unlink(),
    "empty": lambda path: rank_file(path, 0).write_bytes(b""),
    "no manifest": lambda path: (path / NAME).unlink(),
    "edited manifest": lambda path: (path / NAME).write_text((path / NAME).read_text().replace("5000", "5001")),
    "a list as manifest": lambda path: (path / NAME).write_text("[1]"),
    "another step's manifest": lambda path: shutil.copy(path.with_name(OLDER) / NAME, path / NAME),
    "manifest cut": lambda path: (path / NAME).write_bytes((path / NAME).read_bytes()[:200]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_refused_with_one_line(folder: Path, damage: str) -> None:
    DAMAGES[damage](folder / NEWEST)
    message = refusal(folder)
    assert "\n" not in message
    assert NEWEST in message
    assert OLDER in message


def test_another_plan_is_refused_with_what_differs_but_not_what_changes_no_weight(folder: Path) -> None:
    message = refusal(folder, PLAN.replace(seed=7, optimizer={"learning_rate": 0.5}))
    assert "optimizer.learning_rate = 0.5, not" in message
    assert "seed = 7, not 5000" in message
    calmer = PLAN.replace(log_every=3, deadline_s=5.0, max_restarts=2, checkpoint={"every": 2})
    assert not any(isinstance(found, RunFolderError) for found in loaded(folder, calmer))


def test_another_number_of_ranks_or_another_model_is_refused(folder: Path) -> None:
    assert f"{NEWEST} is of 2 ranks, not 1." in refusal(folder, workers=1)
    message = refusal(folder, model="mlp")
    assert re.search(
        r"the model differs from that of .*step-00000003: \S+ is (absent|float64 of shape .*) here", message
    )


def test_what_only_looks_like_a_checkpoint_is_ignored(folder: Path) -> None:
    shutil.copytree(folder / NEWEST, folder / f"{NEWEST}.bak")
    (folder / "step-x").mkdir()
    (folder / "step-00000009").write_text("a file")
    assert list(find_checkpoints(folder)) == [2, 3]
    assert RunFolder(folder.parent).checkpoint_step() == 3
    assert [found[0].step for found in loaded(folder)] == [3, 3]  # type: ignore[index]


def test_checkpoint_of_an_earlier_version_still_loads_and_says_so(folder: Path) -> None:
    as_earlier_version(folder)
    said: list[str] = []
    assert [found[0].step for found in loaded(folder, said=said)] == [3, 3]  # type: ignore[index]
    assert "carries no digest" in said[0]


def narrow(content: dict[str, Any]) -> None:
    content["parameters"] = {name: value.float() for name, value in content["parameters"].items()}


def misshape(content: dict[str, Any]) -> None:
    content["optimizer"]["state"][0]["momentum_buffer"] = torch.ones(5)


SHOWING_DAMAGES: dict[str, tuple[int, Callable[[dict[str, Any]], object]]] = {
    "NaN": (0, lambda content: first_weight(content)[0].fill_(float("nan"))),
    "float32": (0, narrow),
    "no buffers": (1, lambda content: content.pop("buffers")),
    "no progress": (1, lambda content: content.pop("progress")),
    "another step": (1, lambda content: content["progress"].update(step=2)),
    "step as text": (0, lambda content: content["progress"].update(step="3")),
    "odd order": (0, lambda content: content["sync"].update(order=[99])),
    "optimiser of other shapes": (0, misshape),
    "no optimiser": (0, lambda content: content.update(optimizer=None)),
}  # fmt: skip


@pytest.mark.parametrize("damage", SHOWING_DAMAGES)
def test_damage_that_shows_is_found_without_digests_too(folder: Path, damage: str) -> None:
    as_earlier_version(folder)
    rank, change = SHOWING_DAMAGES[damage]
    edit(rank_file(folder / NEWEST, rank), change)
    assert "\n" not in refusal(folder)


def test_another_format_is_refused(folder: Path) -> None:
    as_earlier_version(folder)
    edit(rank_file(folder / NEWEST, 0), lambda content: content.update(format=2))
    (folder / NEWEST / NAME).write_text("{}")
    assert "checkpoint.json is damaged" in refusal(folder)


@given(data=st.data())
@settings(
    max_examples=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_no_damage_to_any_file_is_loaded_or_ends_in_another_error_than_ours(
    written: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, data: st.DataObject
) -> None:
    shutil.rmtree(tmp_path / "fuzzed", ignore_errors=True)
    folder = shutil.copytree(written[0], tmp_path / "fuzzed")
    earlier = data.draw(st.booleans())
    if earlier:
        as_earlier_version(folder)
    path = data.draw(st.sampled_from(sorted((folder / NEWEST).iterdir())))
    content = path.read_bytes()
    start = data.draw(st.integers(0, len(content) - 1))
    stop = data.draw(st.sampled_from([start, start + 1, len(content)]))
    changed = content[:start] + data.draw(st.binary(max_size=20)) + content[stop:]
    path.write_bytes(changed)
    found = loaded(folder)
    if changed != content and not earlier:
        assert all(isinstance(one, RunFolderError) for one in found)
    assert len({isinstance(one, RunFolderError) for one in found}) == 1


def test_manifest_holds_plan_and_digests_as_plain_json(folder: Path) -> None:
    content = json.loads((folder / NEWEST / NAME).read_text())
    assert content["plan"]["seed"] == PLAN.seed
    assert [len(digest) for digest in content["ranks"]] == [64, 64]
    buffer = io.BytesIO(rank_file(folder / NEWEST, 1).read_bytes())
    assert "parameters" not in torch.load(buffer, weights_only=True)


class Watching:
    """An observer that keeps what it is shown, and stops the run when it reads a certain word."""

    def __init__(self, stop_at: str = "nothing") -> None:
        self.stop_at = stop_at
        self.shown: list[str] = []

    def step(self, step: int, total: int, loss: float, units_per_s: float) -> None: ...

    def doing(self, what: str) -> None:
        self.shown.append(what)
        if self.stop_at in what:
            raise KeyboardInterrupt

    def line(self, text: str) -> None:
        self.shown.append(text)


def test_stop_during_evaluation_costs_no_training_and_the_epoch_is_evaluated_after_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "BATCH", 4)

    def live(comm: Communicator, log: EventLog, folder: str, observer: Watching, resume: bool) -> Progress | None:
        worker = make_worker("mlp", "single", comm, log)
        plan = Plan(model="mlp", data="synthetic", method="single", epochs=2, global_batch=100, test_samples=10)
        loop = Loop(plan, worker, Sharding(200, 100, 7), comm, observer, LocalFolder(tmp_path / folder))
        try:
            return loop.run(resume=resume)[0]
        except KeyboardInterrupt:
            return None

    def run(folder: str, observer: Watching, *, resume: bool = False) -> Progress | None:
        return on_threads(1, lambda comm, log: live(comm, log, folder, observer, resume))[0]

    whole, stopped = run("whole", Watching()), run("stopped", Watching("evaluating"))
    assert stopped is None
    assert list(find_checkpoints(tmp_path / "stopped")) == [2]
    watching = Watching()
    resumed = run("stopped", watching, resume=True)
    assert resumed == whole
    assert "evaluating, 67% of the test set" in watching.shown
    assert [epoch["test_images"] for epoch in resumed.epochs] == [10, 10]  # type: ignore[union-attr]
