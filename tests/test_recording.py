"""syncline.record: the steps of anyone's own loop, found by hooks, and what is refused."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Cli
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import syncline
from syncline import recording, world
from syncline.errors import RunFolderError, UsageError
from syncline.spans import Record, read_log
from syncline.store import RunFolder

ROOT = Path(__file__).parents[1]
STEP = ["data", "forward", "backward", "sync", "update"]


@pytest.fixture
def _counting_clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every look at the clock is one nanosecond later than the one before."""
    ticks = itertools.count(1)
    monkeypatch.setattr(recording, "time", SimpleNamespace(monotonic_ns=lambda: next(ticks)))
    return


class Net(nn.Module):
    def __init__(self, output: Callable[[Tensor], Any] = lambda out: out) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.1), nn.Linear(3, 2))
        self.output = output

    def forward(self, inputs: Tensor) -> Any:
        return self.output(self.layers(inputs))


def made(output: Callable[[Tensor], Any] = lambda out: out) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Net(output)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, forwards: int = 1) -> None:
    for _ in range(forwards):
        model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def records_of(folder: Path, rank: int = 0) -> list[Record]:
    return read_log(RunFolder(folder).events(rank))[1:]


def names(records: list[Record], number: int) -> list[str]:
    return [one["name"] for one in records if one["kind"] == "phase" and one["step"] == number]


def hooks_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    found: list[Any] = [model._forward_hooks, model._forward_pre_hooks]
    found += [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
    return found + [parameter._post_accumulate_grad_hooks for parameter in model.parameters()]


@pytest.mark.usefixtures("_counting_clock")
def test_phases_of_a_step_follow_each_other_without_a_gap(tmp_path: Path) -> None:
    model, optimizer = made()
    with syncline.record(model, optimizer, tmp_path / "run") as recorded:
        for _ in range(3):
            step(model, optimizer)
    assert recorded.path == tmp_path / "run"
    records = records_of(recorded.path)
    steps = [one for one in records if one["kind"] == "step"]
    assert [one["step"] for one in steps] == [0, 1, 2]
    for number, whole in enumerate(steps):
        assert names(records, number) == STEP
        data, forward, backward, sync, update = (
            (one["start"], one["end"]) for one in records if one["kind"] == "phase" and one["step"] == number
        )
        assert data[0] == whole["start"]
        assert (data[1], forward[1], backward[1]) == (forward[0], backward[0], sync[0])
        assert sync[1] < update[0]  # the user's own code between backward and the update
        assert update[1] == whole["end"]
    assert [one["start"] for one in steps[1:]] == [one["end"] for one in steps[:-1]]
    assert not any(hooks_of(model, optimizer))
    run = RunFolder(recorded.path)
    summary = run.summary()
    assert summary is not None
    assert (run.info()["kind"], run.info()["status"], summary["steps"]) == ("record", "finished", 3)
    assert run.plan().method == "single"


def test_several_forwards_before_an_update_are_one_step(tmp_path: Path) -> None:
    model, optimizer = made()
    with syncline.record(model, optimizer, tmp_path / "run"):
        step(model, optimizer, forwards=2)
        step(model, optimizer)
    records = records_of(tmp_path / "run")
    assert names(records, 0) == [*STEP[:4], *STEP[:4], "update"]
    assert names(records, 1) == STEP


@pytest.mark.usefixtures("_counting_clock")
@pytest.mark.usefixtures("_counting_clock")
def test_figures_are_not_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the loop asks for them after the update, between backward and update, or after forward."""
    monkeypatch.setattr(world, "time", recording.time)
    model, optimizer = made()
    with syncline.record(model, optimizer, tmp_path / "run"):
        for _ in range(2):
            loss = model(torch.ones(2, 4)).sum()
            syncline.mean(loss)
            loss.backward()
            syncline.mean(loss)
            optimizer.step()
            optimizer.zero_grad()
            syncline.mean(loss)
            syncline.sum(1)
    syncline.mean(1.0)
    records = records_of(tmp_path / "run")
    phases = [one for one in records if one["kind"] == "phase" and one["step"] == 1]
    assert [phase["name"] for phase in phases] == ["data", "data", *STEP]
    assert sum(phase["end"] - phase["start"] for phase in phases if phase["name"] == "data") < 6
    gaps = [later["start"] - phase["end"] for phase, later in itertools.pairwise(phases)]
    assert [gap > 0 for gap in gaps] == [True, True, False, False, False, True], "figures are between phases"


def test_evaluation_belongs_to_no_step(tmp_path: Path) -> None:
    model, optimizer = made()
    with syncline.record(model, optimizer, tmp_path / "run"):
        step(model, optimizer)
        with torch.no_grad():
            for _ in range(5):
                model(torch.ones(2, 4))
        step(model, optimizer)
    records = records_of(tmp_path / "run")
    assert [names(records, number) for number in (0, 1)] == [STEP, STEP]
    first, second = (one for one in records if one["kind"] == "step")
    assert second["start"] >= first["end"] + 5


def test_two_forwards_before_one_backward_and_outputs_of_any_kind(tmp_path: Path) -> None:
    for number, output in enumerate((lambda out: (out, None), lambda out: {"a": [out]}, lambda out: out.sum())):
        model, optimizer = made(output)
        with syncline.record(model, optimizer, tmp_path / f"run-{number}"):
            first, second = (torch.utils._pytree.tree_leaves(model(torch.ones(2, 4)))[0] for _ in range(2))
            (first.sum() + second.sum()).backward()
            optimizer.step()
        assert names(records_of(tmp_path / f"run-{number}"), 0) == ["data", "forward", *STEP]


def test_optimizer_that_calls_the_model_itself_is_all_update(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        return loss

    with syncline.record(model, optimizer, tmp_path / "run"):
        closure()
        optimizer.step(closure)  # type: ignore[arg-type]
    assert names(records_of(tmp_path / "run"), 0) == STEP


@pytest.mark.parametrize(("error", "status"), [(ValueError("mine"), "failed"), (KeyboardInterrupt(), "stopped")])
def test_error_in_the_loop_passes_and_whole_steps_are_kept(error: BaseException, status: str, tmp_path: Path) -> None:
    model, optimizer = made()

    def loop() -> None:
        with syncline.record(model, optimizer, tmp_path / "run"):
            step(model, optimizer)
            model(torch.ones(2, 4)).sum().backward()
            raise error

    with pytest.raises(type(error)):
        loop()
    assert not any(hooks_of(model, optimizer))
    assert [one["step"] for one in records_of(tmp_path / "run") if one["kind"] == "step"] == [0]
    assert RunFolder(tmp_path / "run").info()["status"] == status


def test_model_is_recorded_once_at_a_time_and_a_recording_is_used_once(tmp_path: Path) -> None:
    model, optimizer = made()
    with syncline.record(model, optimizer, tmp_path / "first") as recorded:
        with (
            pytest.raises(UsageError, match="already being recorded"),
            syncline.record(model, optimizer, tmp_path / "b"),
        ):
            pass
        step(model, optimizer)
    with pytest.raises(UsageError, match="already been used"), recorded:
        pass
    with syncline.record(model, optimizer, tmp_path / "second"):
        step(model, optimizer)
    assert not (tmp_path / "b").exists()
    assert [names(records_of(tmp_path / name), 0) for name in ("first", "second")] == [STEP, STEP]


def test_folder_is_made_up_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, optimizer = made()
    with syncline.record(model, optimizer) as recorded:
        pass
    assert recorded.path.parent == Path("runs")
    with pytest.raises(RunFolderError, match="is not empty"), syncline.record(model, optimizer, recorded.path):
        pass
    assert not any(hooks_of(model, optimizer))


@pytest.mark.parametrize(
    ("model", "optimizer", "words"),
    [
        (Net(), None, r"record needs the optimizer: its step\(\) ends a step, but got None"),
        (Net(), Net().parameters(), "needs the optimizer: .* but got a generator"),
        (None, made()[1], "needs the model that your loop calls, but got None"),
    ],
)
def test_what_record_needs_is_said(model: Any, optimizer: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        syncline.record(model, optimizer)


def test_step_in_which_a_loader_starts_its_workers_is_noted(tmp_path: Path) -> None:
    model, optimizer = made()
    loader = torch.utils.data.DataLoader(torch.ones(6, 4), batch_size=2, num_workers=1)
    with syncline.record(model, optimizer, tmp_path / "run"):
        for _ in range(2):
            for batch in loader:
                model(batch).sum().backward()
                optimizer.step()
    noted = [one for one in records_of(tmp_path / "run") if one["kind"] == "loader"]
    assert [(one["step"], one["started"], one["workers"]) for one in noted] == [(0, 1, 1), (3, 1, 1)]


# Many ranks.


def sent(records: list[Record], number: int) -> int:
    return sum(one["bytes"] for one in records if one["kind"] == "collective" and one["step"] == number)


def loop_on_rank(folder: str) -> dict[str, Any]:
    """Every kind of wrapper in one launch, because starting ranks is what takes the time."""
    path, found = Path(folder), {}
    dist.init_process_group("gloo")
    for method in ("ddp", "bucketed", "all-reduce", "shared-memory"):
        model = syncline.DataParallel(Net(), method)
        found[method] = recorded_twice(model, path / method)
        assert model.log.records == []
        model.close()
    found["torch"] = recorded_twice(DistributedDataParallel(Net()), path / "torch")
    hooked = DistributedDataParallel(Net())
    hooked.register_comm_hook(None, default_hooks.allreduce_hook)
    found["hooked"] = recorded_twice(hooked, path / "hooked")
    found["refused"] = refusals(hooked, path)
    dist.destroy_process_group()
    return found


def recorded_twice(model: nn.Module, path: Path) -> list[str]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(2):
        with syncline.record(model, optimizer, f"{path}-{number}") as recorded:
            for _ in range(2):
                with model.no_sync():  # type: ignore[operator]
                    model(torch.ones(2, 4)).sum().backward()
                step(model, optimizer)
        step(model, optimizer)  # not recorded
    return recorded.notes


def refusals(model: nn.Module, path: Path) -> list[str]:
    words = []
    for what, folder in ((model, path / "hooked-0"), (Net(), path / "new")):
        optimizer = torch.optim.SGD(what.parameters(), lr=0.1)
        try:
            with syncline.record(what, optimizer, folder):
                pass
        except UsageError as error:
            words.append(str(error))
    return words


def test_every_rank_of_every_wrapper_is_in_one_folder_with_its_transfers(tmp_path: Path) -> None:
    first, second = syncline.launch(loop_on_rank, str(tmp_path), workers=2, threads=1)
    assert first == second
    assert "hook is already registered" in first["hooked"][0]
    assert [first[name] for name in first if name not in ("hooked", "refused")] == [[]] * 5
    assert "is not empty" in first["refused"][0]
    assert "plain module on 2 ranks" in first["refused"][1]
    gradient_bytes = 4 * (4 * 3 + 3 + 3 * 2 + 2)
    for name in ("ddp", "bucketed", "all-reduce", "shared-memory", "torch", "hooked"):
        for number in range(2):
            folder = tmp_path / f"{name}-{number}"
            run = RunFolder(folder)
            assert (run.info()["status"], run.plan().workers) == ("finished", 2)
            assert run.plan().method == {"torch": "ddp", "hooked": "ddp"}.get(name, name)
            for rank in range(2):
                records = records_of(folder, rank)
                assert [one["step"] for one in records if one["kind"] == "step"] == [0, 1]
                assert names(records, 1) == [*STEP[:4], *STEP[:4], "update"]
                assert (sent(records, 1) >= gradient_bytes) == (name != "hooked"), (name, number, rank)
                assert_waited_for(records)


def assert_waited_for(records: list[Record]) -> None:
    """Backward returns when the transfers are done, so each ends inside the phases of its step."""
    ends = {one["step"]: one["end"] for one in records if one["kind"] == "phase" and one["name"] == "sync"}
    for one in records:
        assert one["kind"] != "collective" or one["step"] < 0 or one["end"] <= ends[one["step"]]


def test_example_runs_as_its_docstring_says_and_can_be_explained(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "record_loop.py")], capture_output=True, text=True, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((folder / "my-run" / "summary.json").read_text())
    assert summary["steps"] == 60
    explained = cli("explain", "my-run", "--json")
    assert explained.returncode == 0, explained.stderr
    document = json.loads(explained.stdout)
    (method,) = document["methods"]
    outliers = sum(len(one["steps"]) for one in method["outliers"])  # as this machine is busy or not
    assert (document["kind"], method["breakdown"]["steps"] + outliers) == ("record", 59)
    parts = method["breakdown"]["parts_s"]
    assert sum(parts.values()) == pytest.approx(method["breakdown"]["step_s"])
    assert min(parts[part] for part in ("data", "forward", "backward", "update")) > 0
    traced = cli("trace", "my-run", "-o", "trace.json")
    assert traced.returncode == 0, traced.stderr
    assert json.loads((folder / "trace.json").read_text())
