"""NaN is loud and named before it spreads; weights that drift apart are found; a run that learns nothing says so."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import ON_THREADS, images, on_threads, small_mlp
from torch import nn

import syncline
from syncline.comm import Communicator
from syncline.errors import CommunicationError, DriftError, NotFiniteError, RankFailed
from syncline.files import to_json
from syncline.plan import OnNan
from syncline.spans import EventLog
from syncline.store import Run
from syncline.sync import make_sync
from syncline.training.health import LossWatch, Replicas, digest, minority, refuse_spoiled_weights
from syncline.training.step import StepResult, Worker, refuse_nan, train_step
from syncline.workload.data.batches import ImageBatches
from syncline.workload.sharding import Sharding
from syncline.workload.tasks import classification


class NanBackwards(torch.autograd.Function):
    """Its gradient is NaN when `poisoned` says so."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, poisoned: bool) -> torch.Tensor:
        ctx.poisoned = poisoned
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * (math.nan if ctx.poisoned else 1), None


class Poisonable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3 * 32 * 32, 4)
        self.last = nn.Linear(4, 10)
        self.poison = ""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        values = self.first(inputs.flatten(1)) * (math.nan if self.poison == "loss" else 1)
        answer: torch.Tensor = self.last(NanBackwards.apply(values, self.poison == "gradient"))  # type: ignore[no-untyped-call]
        return answer


_building = threading.Lock()


def worker_on(comm: Communicator, log: EventLog, method: str, on_nan: OnNan) -> Worker:
    log.method = method
    with _building:
        torch.manual_seed(1)
        model = Poisonable()
    sync = make_sync(method, comm, log=log)
    sync.looks_for_nan = on_nan != "ignore"
    module, optimizer = sync.attach(model), torch.optim.SGD(model.parameters(), lr=0.01)
    batches = ImageBatches(images(), seed=3, channels_last=False)
    return Worker(model, module, sync, optimizer, batches, log, on_nan=on_nan)


def poisoned_in_step_16(comm: Communicator, log: EventLog, method: str, poison: str, on_nan: OnNan) -> Any:
    """Later than `ahead` plans its transfers. The others go on: what they hold then is not theirs."""
    worker = worker_on(comm, log, method, on_nan)
    shards = Sharding(200, 8, 0, comm.rank, comm.world_size).epoch(0)
    result = None
    for log.step in range(17):
        assert isinstance(worker.model, Poisonable)
        worker.model.poison = poison if (log.step, comm.rank) == (16, 1) else ""
        try:
            result = train_step(worker, next(shards))
        except NotFiniteError as error:
            return str(error)
    worker.sync.synchronize()
    worker.sync.detach()
    return result and result.not_finite and str(result.not_finite)


@pytest.mark.parametrize("poison", ["loss", "gradient"])
@pytest.mark.parametrize("method", ON_THREADS)
def test_rank_step_and_parameter_of_a_nan_are_named_before_it_spreads(method: str, poison: str) -> None:
    others, named, _ = on_threads(3, lambda *about: poisoned_in_step_16(*about, method, poison, "stop"))
    assert others is None
    what = "the loss is nan" if poison == "loss" else "the gradient of first."
    assert named.startswith(f"[rank 1, step 16] {what}"), named
    assert f"method {method}" in named


def test_warn_goes_on_and_ignore_does_not_look() -> None:
    for on_nan in ("warn", "ignore"):
        said = on_threads(2, lambda *about, on=on_nan: poisoned_in_step_16(*about, "bucketed", "gradient", on))
        assert [bool(text) for text in said] == [False, on_nan == "warn"]


@pytest.mark.parametrize("method", ["single", "thread-replicas"])
def test_method_without_buckets_looks_at_the_loss_alone_and_says_so(method: str) -> None:
    def live(comm: Communicator, log: EventLog) -> str:
        worker = worker_on(comm, log, method, "stop")
        with pytest.raises(NotFiniteError) as error:
            refuse_nan(worker, StepResult(math.inf, 4, 0.0))
        return error.value.message

    assert on_threads(1, live) == [f"the loss is inf, method {method}, which looks at the loss alone."]


def test_sum_of_16_bit_gradients_does_not_overflow() -> None:
    sync = make_sync("single", on_threads(1, lambda comm, _: comm)[0])
    sync.looks_for_nan = True
    sync._look_at("large", torch.full((100,), 6e4, dtype=torch.float16))
    sync._look_at("infinite", torch.tensor([1.0, math.inf], dtype=torch.bfloat16))
    assert sync.not_finite() == ["infinite"]
    assert sync.not_finite() == []


MODEL = """
import os, torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(3 * 32 * 32, 10)
        self.calls = 0

    def forward(self, inputs):
        self.calls += self.training
        answer = self.last(inputs.flatten(1))
        return answer * float("nan") if os.environ["RANK"] == "1" and self.calls == 7 else answer
"""
SETTINGS = {"evaluate": False, "measure.calibration": 0, "checkpoint.every": 4, "log_every": 4}


def test_nan_of_one_rank_stops_train_and_compare_and_with_warn_no_json_holds_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "poisoned.py").write_text(MODEL)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    about: dict[str, Any] = {"model": "poisoned:Net", "data": "synthetic", "workers": 2, "threads": 1}
    about |= {"global_batch": 8, "steps": 8}
    folder = tmp_path / "run"
    with pytest.raises(RankFailed) as failed:
        syncline.train(**about, method="bucketed", settings=SETTINGS, run_dir=folder)
    assert failed.value.exit_code == 1
    assert failed.value.rank == 1
    assert "[rank 1, step 6] the loss is nan, method bucketed." in str(failed.value)
    assert f"The last good checkpoint is {folder / 'checkpoints' / 'step-00000004'}." in str(failed.value)
    assert failed.value.traceback_text == ""
    with pytest.raises(RankFailed, match=r"\[rank 1, step 6\] the loss is nan, method ring\."):
        syncline.compare(**about, methods=["ring"], settings={"measure.calibration": 0}, run_dir=tmp_path / "c")

    warned = syncline.train(**about, method="ddp", settings={**SETTINGS, "on_nan": "warn"}, run_dir=tmp_path / "w")
    files = [path for path in warned.path.rglob("*.json*") if path.suffix in (".json", ".jsonl")]
    assert any(path.name == "summary.json" for path in files)
    for path in files:
        for text in path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]:
            json.loads(text, parse_constant=lambda word, where=path: pytest.fail(f"{where} holds {word}"))
    assert Run(warned.path).summary["losses"][-1]["loss"] is None
    assert "[rank 1, step 5] the loss is nan" in (warned.path / "logs" / "rank-1.stderr.log").read_text()


def test_json_has_null_where_a_number_is_none() -> None:
    document = {"a": [math.nan, (math.inf, 1.5)], "b": {"c": -math.inf, "d": "nan", "e": True}}
    assert json.loads(to_json(document)) == {"a": [None, [None, 1.5]], "b": {"c": None, "d": "nan", "e": True}}


# Weights that drift apart.


@pytest.mark.parametrize(("world_size", "words"), [
    (2, "ranks 0 and 1 hold different weights after step 8: "),
    (3, "rank 1 holds other weights than the other ranks after step 8: "),
])  # fmt: skip
def test_drift_names_parameter_rank_and_both_checks(world_size: int, words: str) -> None:
    def live(comm: Communicator, _: EventLog) -> Exception | None:
        with _building:
            torch.manual_seed(1)
            model = small_mlp()
        replicas = Replicas(model, comm)
        model.register_buffer("own", torch.tensor(float(comm.rank)))  # buffers may differ
        for step in (2, 4):
            replicas.compare(step)
        if comm.rank == 1:
            with torch.no_grad():
                for parameter in (model[1].bias, model[3].weight):
                    parameter.view(torch.int32).view(-1)[-1] ^= 1
        try:
            replicas.compare(8)
        except (DriftError, CommunicationError) as error:
            return error
        return None

    errors = on_threads(world_size, live)
    blamed = {rank for rank, error in enumerate(errors) if isinstance(error, DriftError)}
    assert blamed == ({0, 1} if world_size == 2 else {1})
    for error in errors:
        assert f"{words}1.bias, the first of 2 parameters that differ;" in str(error)
        assert "all ranks agreed after step 4." in str(error)


def test_minority() -> None:
    assert minority([5, 5, 7, 5]) == [2]
    assert minority([5, 7]) == [0, 1]
    assert minority([5, 5, 7, 7]) == [0, 1, 2, 3]
    assert minority([1, 2, 2, 3]) == [0, 1, 2, 3]
    assert minority([1, 2, 2]) == [0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("count", [1, 3, 8, 17])
def test_digest_changes_with_any_bit_whatever_the_size(dtype: torch.dtype, count: int) -> None:
    values = torch.arange(2 * count).to(dtype)[count:]  # not at the start of its memory
    before = digest(values).item()
    assert digest(values.clone()).item() == before
    values[-1] += 1
    assert digest(values).item() != before


def test_digest_reads_channels_last_weights() -> None:
    weights = torch.randn(4, 3, 3, 3)
    changed = weights.to(memory_format=torch.channels_last)
    before = digest(changed).item()
    changed[2, 1, 0, 0] *= 2
    assert digest(changed).item() != before


def test_weights_that_are_not_finite_are_not_saved() -> None:
    model = small_mlp()
    refuse_spoiled_weights(model, rank=0, step=3)
    with torch.no_grad():
        model[3].weight[0, 0] = math.inf
    with pytest.raises(NotFiniteError, match=r"\[rank 0, step 3\] the weights 3.weight are not finite"):
        refuse_spoiled_weights(model, rank=0, step=3)


def test_loss_above_a_guess_is_said_once_after_the_first_steps() -> None:
    guess = classification(10, (3, 32, 32)).guess_loss(torch.zeros(2, 10))
    assert guess == pytest.approx(math.log(10))
    watch = LossWatch()
    said = [watch.look(step, 4.0, guess, 0.5) for step in range(1, 40)]
    assert [step for step, text in enumerate(said, 1) if text] == [20]
    assert "4, is above that of a uniform guess, 2.3: the learning rate, 0.5, is probably too high" in said[19]
    assert not any(LossWatch().look(step, 2.4, guess, 0.5) for step in range(1, 40)), "data without a pattern"
    assert LossWatch().look(30, 9.0, None, 0.5) == ""
