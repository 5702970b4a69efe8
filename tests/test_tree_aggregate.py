"""tree-aggregate: a step as a Spark job gives the gradients of the whole batch, and is counted, named and ended."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import one_compute_thread
from torch import nn

from syncline.comm.threads import ThreadCommunicator, ThreadWorld
from syncline.errors import CommunicationError, DeadlineError, PlanError
from syncline.measure.certify import Certifier
from syncline.plan import parse_plan
from syncline.spans import EventLog
from syncline.studies import run_lab
from syncline.study.answering import answered
from syncline.study.lab_code import LABS, load_answers
from syncline.study.rows import Row
from syncline.sync import make_sync
from syncline.sync.spark_jobs import SparkJobs, spark_jobs
from syncline.sync.tree_aggregate import Sum, TreeAggregate, combined, parts_of, timeline
from syncline.training.step import ShardStep
from syncline.workload.data.batches import ImageBatches
from syncline.workload.data.synthetic import synthetic_images
from syncline.workload.models import build_model
from syncline.workload.sharding import Shard, Sharding

pytestmark = pytest.mark.timeout(240)
MISSING = [
    name
    for name, found in (("pyspark", importlib.util.find_spec("pyspark")), ("java", shutil.which("java")))
    if found is None
]
needs_spark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where Spark keeps its files."""
    return tmp_path_factory.mktemp("spark")


@pytest.fixture(scope="module")
def spark(folder: Path) -> Iterator[SparkJobs]:
    """One for all tests of this file."""
    before, os.environ["SPARK_LOCAL_DIRS"] = os.environ.get("SPARK_LOCAL_DIRS"), str(folder)
    jobs = spark_jobs(2)
    yield jobs
    jobs.end()
    del os.environ["SPARK_LOCAL_DIRS"]
    if before is not None:
        os.environ["SPARK_LOCAL_DIRS"] = before


@pytest.fixture(scope="module")
def batches() -> ImageBatches:
    return ImageBatches(synthetic_images(200, 10), seed=0, channels_last=False)


def world_of_one() -> ThreadCommunicator:
    return ThreadCommunicator(ThreadWorld(1), 0)


def attached(model: nn.Module, partitions: int) -> TreeAggregate:
    sync = make_sync("tree-aggregate", world_of_one(), log=EventLog(), partitions=partitions)
    assert isinstance(sync, TreeAggregate)
    sync.log.step = 7
    sync.attach(model)
    return sync


def whole(batch: int) -> Shard:
    return next(Sharding(200, batch, 0).epoch(0))


@needs_spark
@pytest.mark.parametrize("workers", [3, 8])
def test_gradients_are_those_of_the_shards_and_of_the_whole_batch(
    spark: SparkJobs, batches: ImageBatches, workers: int
) -> None:
    certifier = Certifier(
        communicator=world_of_one(),
        make_sync=partial(make_sync, "tree-aggregate", partitions=workers),
        make_model=lambda: build_model("cnn", seed=0),
        batches=batches,
        sharding=Sharding(200, 4 * workers + 1, 0, 0, workers),
        log=EventLog(keep=False),
        steps=2,
    )
    with one_compute_thread():
        certificate = certifier.run()
    assert certificate is not None
    assert certificate.sequential.status in ("bitwise", "order")
    assert certificate.one_worker.status in ("bitwise", "order")


@needs_spark
@pytest.mark.parametrize(("partitions", "stages", "tasks", "results"), [(4, 1, 4, 4), (8, 2, 10, 2)])
def test_job_is_counted_and_its_time_accounted_for(
    spark: SparkJobs, batches: ImageBatches, partitions: int, stages: int, tasks: int, results: int
) -> None:
    """With 4 partitions everything goes to the driver, with 8 only two partial sums."""
    model = build_model("cnn", seed=0)
    sync = attached(model, partitions)
    parts = sync.compute(ShardStep(batches, 0, 0.0, 1, "float32"), whole(17))
    sync.detach()
    assert sum(part.num_samples for part in parts) == 17
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    job = next(record for record in sync.log.records if record["kind"] == "job")
    assert (job["stages"], job["tasks"]) == (stages, tasks)
    assert gradients < job["broadcast_bytes"] < 1.2 * gradients
    assert results * gradients < job["result_bytes"] < 1.2 * results * gradients
    assert (job["shuffle_bytes"] > 0) == (stages > 1)
    spans = [record for record in sync.log.records if record["kind"] == "phase"]
    assert {"stall", "forward", "backward", "sync"} <= {span["name"] for span in spans}
    ordered = sorted((span["start"], span["end"]) for span in spans)
    assert all(one[1] == other[0] for one, other in pairwise(ordered)), "a gap or an overlap"


@needs_spark
def test_driver_keeps_the_buffers_of_partition_0(spark: SparkJobs) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    sync = attached(model, 2)

    def step(model: nn.Module, shard: Shard, rank: int, _step: int, _log: EventLog) -> int:
        model(torch.full((4, 2), float(rank)) + torch.rand(4, 2)).sum().backward()
        model[1].running_mean.fill_(rank + 1)  # type: ignore[index,union-attr,operator]
        return rank

    assert sync.compute(step, whole(8)) == [0, 1]
    sync.detach()
    assert torch.equal(model[1].running_mean, torch.ones(3))  # type: ignore[arg-type]
    assert model[1].num_batches_tracked == 1
    assert model[0].bias.grad is not None


@needs_spark
def test_task_that_raises_is_named(spark: SparkJobs) -> None:
    sync = attached(nn.Linear(2, 2), 4)

    def step(_model: nn.Module, _shard: Shard, rank: int, _step: int, _log: EventLog) -> None:
        if rank == 2:
            raise ValueError("no such sample")

    with pytest.raises(
        CommunicationError, match=r"\[step 7\] partition 2 of .* raised ValueError: no such"
    ) as raised:
        sync.compute(step, whole(8))
    assert "in step" in raised.value.__notes__[0], "the user's own line"
    sync.detach()


@needs_spark
def test_task_that_is_killed_is_named(spark: SparkJobs) -> None:
    sync = attached(nn.Linear(2, 2), 2)

    def step(_model: nn.Module, _shard: Shard, rank: int, _step: int, _log: EventLog) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(
        CommunicationError, match="partition 1 of the Spark job of step 7 failed: Python worker exited"
    ):
        sync.compute(step, whole(8))
    sync.detach()


@needs_spark
def test_job_that_hangs_has_a_deadline(spark: SparkJobs) -> None:
    sync = attached(nn.Linear(2, 2), 1)
    sync.communicator.deadline_s = 2

    def step(_model: nn.Module, _shard: Shard, _rank: int, _step: int, _log: EventLog) -> None:
        signal.pause()

    with pytest.raises(DeadlineError, match="the Spark job of step 7 did not end within 2 s"):
        sync.compute(step, whole(8))
    sync.detach()


@needs_spark
def test_nothing_is_left_at_the_end(spark: SparkJobs, folder: Path) -> None:
    """The last of the tests with Spark."""
    process = spark.context._gateway.proc
    assert list(folder.iterdir()), "it would look at the wrong place"
    spark.end()
    assert process.poll() is not None
    assert not list(folder.iterdir())


# Without Spark.


def test_shares_are_those_of_ranks() -> None:
    for count in (1, 3, 4, 20):
        shares = parts_of(whole(17), count)
        expected = [next(Sharding(200, 17, 0, rank, count).epoch(0)) for rank in range(count)]
        assert [share.indices.tolist() for share in shares] == [share.indices.tolist() for share in expected]
        assert [share.weight for share in shares] == [share.weight for share in expected]


def test_sums_begin_with_nothing_and_keep_the_first_failure() -> None:
    assert combined(None, None) is None
    one = Sum([torch.ones(2).numpy(), None], {0: "a"}, [("forward", 0, 1)], [torch.ones(1).numpy()])
    other = Sum([torch.ones(2).numpy(), torch.ones(1).numpy()], {1: "b"}, [("forward", 1, 2)])
    assert combined(None, one) is one
    total = combined(one, other)
    assert total is not None
    assert [array.tolist() for array in total.gradients if array is not None] == [[2.0, 2.0], [1.0]]
    assert (total.results, len(total.spans), len(total.buffers)) == ({0: "a", 1: "b"}, 2, 1)
    failed = combined(total, Sum(failed=(1, "ValueError", "")))
    assert failed is not None
    assert failed.failed is not None


def test_timeline_cuts_what_tasks_do_at_once_into_phases_and_pauses() -> None:
    spans = [("forward", 10, 20), ("backward", 20, 30), ("forward", 15, 25), ("backward", 25, 40), ("data", 50, 60)]
    phases, pauses = timeline(spans, 5)
    assert phases == [("forward", 10, 20), ("backward", 20, 40), ("data", 50, 60)]
    assert pauses == [(5, 10), (40, 50)]
    assert timeline([], 5) == ([], [])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hosts": 2}, "needs all ranks on one host"),
        ({"loaders": 2}, "cannot do loaders 2"),
        ({"batch_norm": "sync"}, "cannot do batch_norm sync"),
        ({"inject": {"rank": 0, "delay_ms": 5.0}}, "cannot do inject"),
        ({"device": "cuda"}, "choose device cpu"),
    ],
)
def test_plan_refuses_what_tasks_cannot_do(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        parse_plan({"method": "tree-aggregate", "workers": 2, **changes})


def test_without_the_extra_the_lab_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    find = importlib.util.find_spec
    hidden = lambda name, *rest: None if name == "pyspark" else find(name, *rest)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", hidden)
    with pytest.raises(PlanError, match=r"tree-aggregate needs the package pyspark, .*pip install") as refused:
        run_lab("spark", quick=True, out=tmp_path / "lab")
    assert refused.value.exit_code == 2
    assert not (tmp_path / "lab").exists()


def row(method: str, workers: int, seconds: float, **figures: float) -> Row:
    parts = {"backward": 0.1, "wire": seconds - 0.1, "hidden": 0.3 if method == "bucketed" else 0.0}
    point = {"method": method, "workers": workers, "model": "vgg11", "global_batch": 32}
    return Row("time", point, [seconds, seconds * 1.01, seconds, seconds * 0.99, seconds], figures, parts)


def test_answers_come_from_the_numbers() -> None:
    answers = load_answers(LABS / "spark")
    assert "why-not" in answers
    size = 40e6
    rows = [
        row("bucketed", 4, 0.4, gradient_bytes=size, root_bytes=1.5 * size * 2),
        row(
            "tree-aggregate",
            4,
            1.6,
            gradient_bytes=size,
            root_bytes=5 * size,
            result_bytes=4 * size,
            tasks=4,
            stages=1,
        ),
        row("bucketed", 8, 0.4, gradient_bytes=size, root_bytes=1.75 * size * 2),
        row(
            "tree-aggregate",
            8,
            2.0,
            gradient_bytes=size,
            root_bytes=3 * size,
            result_bytes=2 * size,
            tasks=10,
            stages=2,
        ),
    ]
    said = answered(answers["why-not"], rows, {})
    assert "vgg11 on 8 workers: tree-aggregate takes 2.00" in said
    assert "5.0 times as long" in said
    assert "starts 10 tasks and puts 120.0 MB through the driver, against 140.0 MB" in said
    levels = answered(answers["tree-levels"], rows, {})
    assert "4 partitions: no tree, all goes to the driver (1 stage, 4 gradients made, 4.0 sent" in levels
    assert "8 partitions: 2 partial sums come first (2 stages, 8 gradients made, 2.0 sent" in levels
    assert "5.0 times on 4 (200.0 MB) and 3.0 times on 8" in answered(answers["through-the-driver"], rows, {})
    assert answered(answers["why-not"], rows[:1], {}).startswith("Not answered")
