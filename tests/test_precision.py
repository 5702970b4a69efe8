"""bf16: what is computed in 16 bits and what is not: models, methods, evaluation, certificates, recordings."""

from __future__ import annotations

import copy
import json
from collections import namedtuple
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import ON_THREADS, on_threads, small_batches
from test_certify import batch_norm_model
from test_step import shard_of, state
from torch import Tensor, nn

import syncline
from syncline.accounting.explanation import _machine
from syncline.comm import Communicator
from syncline.errors import PlanError
from syncline.measure.certify import SIXTEEN_BITS, STATISTICS, Certificate, Certifier
from syncline.plan import Plan
from syncline.report.terminal import describe
from syncline.resolve import resolve
from syncline.spans import EventLog
from syncline.sync import GradientSync, make_sync
from syncline.sync.after_backward import AllReduce
from syncline.sync.batch_norm import attach
from syncline.training.evaluate import evaluate
from syncline.training.step import Worker, train_step
from syncline.words import MODELS
from syncline.workload.models import build_model, usual_task
from syncline.workload.precision import forward_in, widened
from syncline.workload.recorded import load_times
from syncline.workload.sharding import Sharding

with torch.random.fork_rng():
    torch.manual_seed(1)
    TEMPLATE = batch_norm_model()
BF16 = torch.bfloat16


class Seen(nn.Module):
    """Notes the dtype of what passes."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def forward(self, values: Tensor) -> Tensor:
        self.dtypes.append(values.dtype)
        return values


def make_worker(method: str, comm: Communicator, log: EventLog, *, policy: Any = None, **settings: Any) -> Worker:
    model = copy.deepcopy(TEMPLATE)
    model.insert(1, Seen())
    sync = make_sync(method, comm, batch_norm=policy)
    module = attach(sync, model, policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return Worker(model, module, sync, optimizer, small_batches(), log, precision="bf16", **settings)


@pytest.mark.parametrize("policy", ["local", "sync"])
def test_products_have_16_bits_and_all_that_is_kept_has_32(policy: str) -> None:
    def live(comm: Communicator, log: EventLog) -> tuple[Worker, float]:
        worker = make_worker("all-reduce", comm, log, policy=policy)
        result = train_step(worker, shard_of(comm, 9, 0))
        return worker, result.loss

    for worker, loss in on_threads(2, live):
        assert set(worker.model[1].dtypes) == {BF16}
        kept = [t for t in worker.model.state_dict().values() if t.is_floating_point()]
        assert {tensor.dtype for tensor in kept} == {torch.float32}
        # A mean of 16-bit numbers would be one; statistics and loss are not.
        statistics = worker.model[2].running_mean
        assert not torch.equal(statistics, statistics.to(BF16).float())
        assert loss != torch.tensor(loss).to(BF16).item()


@pytest.mark.parametrize("method", [*ON_THREADS, "single"])
def test_gradients_are_near_those_of_float32_with_every_method(method: str) -> None:
    def live(comm: Communicator, log: EventLog) -> dict[str, Tensor]:
        worker = make_worker(method, comm, log, accumulate=2)
        train_step(worker, shard_of(comm, 9, 0))
        return state(worker.model)

    def exact(comm: Communicator, log: EventLog) -> dict[str, Tensor]:
        worker = make_worker(method, comm, log, accumulate=2)
        plain = Worker(worker.model, worker.module, worker.sync, worker.optimizer, worker.batches, log, accumulate=2)
        train_step(plain, shard_of(comm, 9, 0))
        return state(worker.model)

    count = 1 if method == "single" else 2
    for found, expected in zip(on_threads(count, live), on_threads(count, exact), strict=True):
        assert any(not torch.equal(found[key], expected[key]) for key in expected)
        for key in expected:
            torch.testing.assert_close(found[key], expected[key], rtol=0.02, atol=0.02)


def test_replicas_on_threads_compute_in_16_bits() -> None:
    def live(comm: Communicator, log: EventLog) -> list[torch.dtype]:
        model = nn.Sequential(nn.Conv2d(3, 4, 3, stride=4), Seen(), nn.Flatten(), nn.Linear(256, 10))
        sync = make_sync("thread-replicas", comm, replicas=2)
        module = sync.attach(model)
        forward_in("bf16", module, torch.randn(4, 3, 32, 32)).sum().backward()
        seen = [dtype for replica in module._copies for dtype in replica[1].dtypes]  # type: ignore[union-attr]
        sync.detach()
        assert model[0].weight.grad is not None
        return seen

    assert on_threads(1, live) == [[BF16, BF16]]


def test_evaluation_computes_in_the_same_precision() -> None:
    def live(comm: Communicator, log: EventLog) -> tuple[float, float]:
        worker = make_worker("all-reduce", comm, log)
        losses = [evaluate(worker.model, worker.batches, comm, kind).loss for kind in ("bf16", "float32")]
        assert worker.model[1].dtypes[0] == BF16
        assert worker.model[1].dtypes[-1] == torch.float32
        return losses[0], losses[1]

    for half, full in on_threads(1, live):
        assert half != full
        assert half == pytest.approx(full, rel=0.02)


@pytest.mark.parametrize("name", ["vgg11-quarter", "resnet18", "bert-small", "cnn", "mlp"])
def test_models_compute_a_loss_and_gradients(name: str) -> None:
    task, model = usual_task(name), build_model(name, seed=1).eval()
    inputs = torch.randint(0, 99, (2, 8)) if MODELS[name].texts else torch.randn(2, *task.input_shape)
    targets = torch.zeros((2, 8) if MODELS[name].texts else (2,), dtype=torch.int64)
    losses = [task.loss(forward_in(kind, model, inputs), targets) for kind in ("float32", "bf16")]
    losses[1].backward()
    assert losses[1].dtype == torch.float32
    assert losses[1].item() != losses[0].item()
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=0.05)
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in model.parameters())


def test_outputs_are_widened_in_whatever_they_come() -> None:
    half = torch.ones(1, dtype=BF16)
    pair = namedtuple("pair", ["logits", "aux"])
    for outputs in (half, (half, half), [half], {"a": half}, pair(half, half), SimpleNamespace(logits=half)):
        made = widened(outputs)
        assert type(made) is type(outputs)
        parts = [made] if isinstance(made, Tensor) else made.values() if isinstance(made, dict) else made
        parts = [made.logits] if isinstance(made, SimpleNamespace) else parts
        assert {part.dtype for part in parts} == {torch.float32}
    assert half.dtype == BF16
    whole = torch.ones(1, dtype=torch.float64)
    assert widened(whole) is whole
    assert widened("text") == "text"


def certified(make: Any, *, precision: str, policy: Any = None) -> Certificate:
    def live(comm: Communicator, log: EventLog) -> Certificate | None:
        return Certifier(
            communicator=comm,
            make_sync=make,
            make_model=lambda: copy.deepcopy(TEMPLATE),
            batches=small_batches(),
            sharding=Sharding(200, 4 * comm.world_size + 1, 7, comm.rank, comm.world_size),
            log=log,
            batch_norm=policy,
            precision=precision,  # type: ignore[arg-type]
        ).run()

    first = on_threads(2, live)[0]
    assert first is not None
    return first


@pytest.mark.parametrize(("policy", "cause"), [("local", f"{STATISTICS}, {SIXTEEN_BITS}"), ("sync", SIXTEEN_BITS)])
def test_certificate_is_as_exact_and_names_16_bits(policy: str, cause: str) -> None:
    def make(comm: Communicator) -> GradientSync:
        return make_sync("all-reduce", comm, batch_norm=policy)

    certificate = certified(make, precision="bf16", policy=policy)
    assert certificate.passed
    assert certificate.sequential.status == "bitwise"
    assert (certificate.one_worker.status, certificate.one_worker.cause) == ("explained", cause)
    assert certificate.one_worker.difference is not None
    assert 1e-4 < certificate.one_worker.difference < 0.2
    words = describe(asdict(certificate.one_worker))
    assert f"differs: {cause}; equal without" in words
    assert f"; 16 bits alone: {certificate.one_worker.difference:.1e}" in words
    plain = certified(make, precision="float32", policy=policy).one_worker
    assert SIXTEEN_BITS not in plain.cause
    assert plain.difference is None


class SlightlyWrong(AllReduce):
    def average(self, name: str, gradient: Tensor, ready_ns: int) -> None:
        super().average(name, gradient, ready_ns)
        gradient.mul_(1.00001)


def test_16_bits_are_no_excuse_for_a_wrong_method() -> None:
    """An error far below what 16 bits do to a gradient."""
    certificate = certified(SlightlyWrong, precision="bf16")
    assert certificate.sequential.status == "different"
    assert certificate.one_worker.status == "different"


def test_run_records_its_precision_and_replay_keeps_it(tmp_path: Path) -> None:
    small: dict[str, Any] = {"model": "mlp", "data": "synthetic", "global_batch": 8, "threads": 1, "steps": 2}
    run = syncline.train(**small, method="single", precision="bf16", run_dir=tmp_path / "run")
    assert run.plan.precision == "bf16"
    assert isinstance(run.machine["bf16"], list)
    assert load_times(f"replay:{run.path}").precision == "bf16"
    replayed, _ = resolve(Plan(compute=f"replay:{run.path}", workers=2), ranks_per_host=2)
    assert replayed.precision == "bf16"
    recording = run.path / "compute.json"
    recording.write_text(json.dumps({**json.loads(recording.read_text()), "precision": "float32"}))
    with pytest.raises(PlanError, match="precision is bf16, but the recorded times are for float32"):
        resolve(Plan(compute=f"replay:{run.path}", workers=2, precision="bf16"), ranks_per_host=2)


@pytest.mark.parametrize(
    ("changes", "kind", "found", "expected"),
    [
        ({}, "train", {"cores": 2, "bf16": ["amx_bf16", "avx512_bf16"]}, "amx_bf16"),
        ({"precision": "bf16"}, "train", {"cores": 2, "bf16": ["avx512_bf16"]}, None),
        ({}, "record", {"cores": 2, "bf16": ["avx512_bf16"]}, None),
        ({"device": "cuda"}, "train", {"cores": 2, "bf16": ["avx512_bf16"]}, None),
        ({"compute": "replay:x"}, "train", {"cores": 2, "bf16": ["avx512_bf16"]}, None),
        ({}, "train", {"cores": 2, "bf16": []}, None),
        ({}, "train", {"cores": 2}, None),
    ],
)
def test_bf16_is_advised_where_the_run_left_it_unused(
    changes: dict[str, Any], kind: str, found: dict[str, Any], expected: str | None
) -> None:
    run: Any = SimpleNamespace(machine=found, plan=Plan(**changes), kind=kind)
    assert _machine(run).bf16 == expected


def test_wrong_precision_is_refused() -> None:
    with pytest.raises(PlanError, match=r"precision: unknown value 'bf1'\. Did you mean 'bf16'"):
        syncline.train(precision="bf1")
