"""Horovod's torch API. Two worlds of processes run all of tests/horovod_checks.py; here each check is a test."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod_checks
import pytest
import torch
from torch import nn

import syncline
import syncline.horovod.torch as hvd
from syncline.errors import UsageError
from syncline.horovod import lane, world
from syncline.horovod.common.util import env
from syncline.horovod.matching import Matching
from syncline.horovod.runner.util.threads import in_thread
from syncline.horovod.stalls import Stalls
from syncline.horovod.timeline import Timeline
from syncline.launcher.adopt import horovod_variables, placement_from_environment

STALL_CHECK_S = 0.5

Worlds = Callable[[int], list[dict[str, str]]]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    """What every rank of a world of that size found."""
    done: dict[int, list[dict[str, str]]] = {}

    def world_of(size: int) -> list[dict[str, str]]:
        if size not in done:
            logs = tmp_path_factory.mktemp(f"world-{size}")
            done[size] = syncline.launch(horovod_checks.run_all, STALL_CHECK_S, workers=size, threads=1, log_dir=logs)
        return done[size]

    return world_of


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("check", [check.__name__ for check in horovod_checks.CHECKS])
def test_on_ranks(worlds: Worlds, size: int, check: str) -> None:
    for rank, found in enumerate(worlds(size)):
        failed = [text for text in found.values() if text != "ok"]
        assert found.get(check, f"not reached: {failed}") == "ok", f"rank {rank}: {found.get(check)}"


def request(name: str = "x", **more: Any) -> dict[str, Any]:
    return {"kind": "allreduce", "name": name, "shapes": [[2]], "dtypes": ["float32"], "op": "sum", **more}


def test_names_are_answered_when_all_have_submitted_in_any_order() -> None:
    matching = Matching(2)
    assert matching.submit(0, request("a"), 0.0) == []
    assert matching.submit(1, request("b"), 0.0) == []
    (first,) = matching.submit(0, request("b"), 0.0)
    (second,) = matching.submit(1, request("a"), 0.0)
    assert (first["key"], second["key"]) == ([0, "allreduce.b"], [0, "allreduce.a"])
    assert first["ranks"] == [0, 1]
    assert first["error"] is None


def test_a_rank_that_joins_releases_what_waits_for_it_and_leaving_fails_it() -> None:
    matching = Matching(3)
    matching.submit(0, request(), 0.0)
    matching.submit(1, request(), 0.0)
    (answer,) = matching.submit(2, {"kind": "join", "name": "join"}, 0.0)
    assert answer["zeros"]["shapes"] == [[2]]
    matching.submit(0, request("y"), 0.0)
    (failed,) = matching.leave(1, "rank 1 has left")
    assert (failed["ranks"], failed["error"]) == ([0], "rank 1 has left")


def test_stalls_are_told_once_for_each_doubling_and_end_the_run_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", "5")
    monkeypatch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "60")
    matching, told, ended = Matching(2), [], []
    stalls = Stalls(matching, lambda ranks, message: None, ended.append, told.append)
    matching.submit(0, request("loss"), 0.0)
    stalls.on_status(1, {"last": "broadcast 'w'", "ago": 2.0, "at": "train.py:7 in main", "waits": ""}, 4.0)
    for now in range(0, 66, 2):
        stalls.look(float(now))
    assert [re.search(r"waited (\d+) s", line)[1] for line in told] == ["6", "12", "24", "48"]
    assert "rank 1, which did broadcast 'w' 4 s ago and is at train.py:7 in main" in told[0]
    assert len(ended) == 1
    assert "The limit is 60 s" in ended[0]


def test_a_step_that_some_ranks_wait_in_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", "5")
    told: list[str] = []
    stalls = Stalls(Matching(2), lambda ranks, message: None, lambda why: None, told.append)
    for now in (0.0, 3.0, 6.0):
        stalls.on_status(0, {"last": "", "ago": 0.0, "at": "", "waits": "step 4"}, now)
        stalls.on_status(1, {"last": "step 3", "ago": now, "at": "train.py:9 in validate", "waits": ""}, now)
        stalls.look(now)
    assert told == [
        "syncline.horovod: rank 0 has waited 6 s in step 4 for rank 1, which did step 3 6 s ago and is at "
        "train.py:9 in validate."
    ]


def test_alone() -> None:
    """Without a launcher the world is this process; nothing is averaged, and everything works."""
    with pytest.raises(ValueError, match="not been initialized"):
        hvd.size()
    hvd.init()
    try:
        assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.cross_size()) == (0, 1, 0, 1)
        model = nn.Linear(2, 1)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        for _ in range(2):
            model(torch.ones(2)).sum().backward()
        optimizer.step()
        assert torch.equal(hvd.allreduce(torch.ones(2), op=hvd.Sum), torch.ones(2))
        assert torch.equal(hvd.allgather(torch.ones(2)), torch.ones(2))
        assert hvd.broadcast_object("word") == "word"
        assert hvd.join() == 0
    finally:
        hvd.shutdown()


def test_a_name_is_taken_until_somebody_asks_for_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    hvd.init()
    try:
        monkeypatch.setattr(lane, "CYCLE_S", 1000.0)
        first = hvd.allreduce_async(torch.ones(2), name="twice")
        assert world.current().lane._handles[first].done.wait(60)
        for _ in range(2):
            with pytest.raises(ValueError, match="same name"):
                hvd.allreduce_async(torch.ones(2), name="twice")
        assert hvd.poll(first)
        second = hvd.allreduce_async(torch.ones(2), name="twice")
        hvd.synchronize(second)
        third = hvd.allreduce_async(torch.ones(2), name="twice")
        assert world.current().lane._handles[third].done.wait(60)
        monkeypatch.setattr(lane, "CYCLE_S", 0.0)
        hvd.synchronize(hvd.allreduce_async(torch.ones(2), name="twice"))
    finally:
        hvd.shutdown()


def test_horovod_s_own_variables_are_a_place() -> None:
    environment = {
        "HOROVOD_RANK": "3", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2",
        "HOROVOD_CROSS_RANK": "1", "HOROVOD_CROSS_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "29500",
    }  # fmt: skip
    place = placement_from_environment(environment)
    assert place is not None
    assert (place.rank, place.world_size, place.local_rank, place.host_index, place.num_hosts) == (3, 4, 1, 1, 2)
    assert {**horovod_variables(place), "MASTER_ADDR": "node0", "MASTER_PORT": "29500"} == environment
    with pytest.raises(UsageError, match="MASTER_ADDR"):
        placement_from_environment({key: value for key, value in environment.items() if key != "MASTER_ADDR"})


TABLE = """
init shutdown is_initialized rank size local_rank local_size cross_rank cross_size is_homogeneous allreduce
allreduce_async allreduce_ allreduce_async_ grouped_allreduce grouped_allreduce_async grouped_allreduce_
grouped_allreduce_async_ allgather allgather_async grouped_allgather grouped_allgather_async broadcast broadcast_
broadcast_async broadcast_async_ broadcast_parameters broadcast_optimizer_state broadcast_object allgather_object
DistributedOptimizer Compression Compression.none Compression.fp16 Average Sum Min Max Product Adasum poll
synchronize join barrier alltoall alltoall_async reducescatter reducescatter_async grouped_reducescatter
grouped_reducescatter_async sparse_allreduce_async ProcessSet global_process_set add_process_set remove_process_set
SyncBatchNorm start_timeline stop_timeline mpi_built gloo_built nccl_built ddl_built ccl_built cuda_built rocm_built
mpi_enabled gloo_enabled mpi_threads_supported HorovodInternalError
"""
"""Every symbol that scripts take from `horovod.torch`."""


@pytest.mark.parametrize("name", TABLE.split())
def test_every_symbol_is_there(name: str) -> None:
    found: Any = hvd
    for part in name.split("."):
        found = getattr(found, part)
    assert found is not None
    if "." not in name:
        assert name in hvd.__all__


def test_modules_that_scripts_import_have_the_names() -> None:
    from syncline.horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
    from syncline.horovod.common.util import check_extension, extension_available
    from syncline.horovod.torch import compression, functions, mpi_ops

    assert mpi_ops.allreduce is hvd.allreduce
    assert compression.Compression is hvd.Compression
    assert functions.broadcast_parameters is hvd.broadcast_parameters
    assert issubclass(HorovodInternalError, RuntimeError)
    assert HostsUpdatedInterrupt(skip_sync=True).skip_sync
    assert extension_available("torch")
    with pytest.raises(ImportError, match=r"horovod\.torch alone"):
        check_extension("horovod.tensorflow")


def test_a_full_disk_ends_the_timeline_alone(capsys: pytest.CaptureFixture[str]) -> None:
    timeline = Timeline()
    timeline.start("/dev/full")
    for _ in range(2):
        timeline.note(request(), 0, 0)
    timeline.stop()
    assert capsys.readouterr().err.count("the timeline ends here") == 1


def test_variables_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERE", "before")
    with env(HERE="inside", NEW="too", NOT_GIVEN=None):
        assert (os.environ["HERE"], os.environ["NEW"]) == ("inside", "too")
        assert "NOT_GIVEN" not in os.environ
    assert os.environ["HERE"] == "before"
    assert "NEW" not in os.environ


def test_a_function_runs_in_a_thread(capsys: pytest.CaptureFixture[str]) -> None:
    got: list[int] = []
    started = in_thread(got.append, (3,), name="mine")
    started.join()
    assert got == [3]
    assert (started.name, started.daemon) == ("mine", True)
    in_thread(int, ("three",), silent=True).join()
    assert "ValueError" not in capsys.readouterr().err
    with pytest.raises(ValueError, match="must be a tuple"):
        in_thread(got.append, [3])  # type: ignore[arg-type]


def test_compressors_round_as_horovod_s_do() -> None:
    values = torch.tensor([1.0, 1.0 + 2**-12])
    sent, context = hvd.Compression.fp16.compress(values)
    assert sent.dtype == torch.float16
    assert hvd.Compression.fp16.decompress(sent, context).dtype == torch.float32
    whole = torch.ones(2, dtype=torch.int32)
    assert hvd.Compression.fp16.compress(whole)[0].dtype == torch.int32
    assert hvd.Compression.none.compress(values)[0] is values


def test_nothing_in_the_package_speaks_of_the_real_horovod_s_files() -> None:
    """Our own code imports nothing called horovod: the name may belong to somebody else's package."""
    package = Path(syncline.__file__).parent / "horovod"
    for path in package.rglob("*.py"):
        assert not re.search(r"^\s*(import|from) horovod\b", path.read_text(), re.MULTILINE), path
