"""hierarchical with option ahead: the bits of the same without it, on 2 hosts x 2 ranks, threads and processes."""

from __future__ import annotations

import copy
import random
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import on_threads
from torch import Tensor, nn

import syncline
from syncline.comm import Communicator, instrumented
from syncline.comm.torch_backend import connect
from syncline.errors import PlanError
from syncline.launcher.adopt import placement_from_environment
from syncline.plan import parse_plan
from syncline.spans import EventLog
from syncline.sync import make_sync
from syncline.sync.ahead import Ahead
from syncline.sync.ahead_between_leaders import AheadBetweenLeaders

HOSTS = [0, 0, 1, 1]
CHUNK_MB = 0.001
torch.manual_seed(0)
TEMPLATE = nn.Sequential(
    nn.Linear(6, 16), nn.Tanh(), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 3)
)


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1000 * rank + step))


def train(
    comm: Communicator, log: EventLog, *, steps: int = 16, slow: bool = False, lone: bool = False, **options: Any
) -> dict[str, Any]:
    """`lone`: rank 0 alone saves in the middle, which waits for what is on its way."""
    model = copy.deepcopy(TEMPLATE)
    sync = make_sync("hierarchical", comm, log=log, **options)
    module, losses, stalled = sync.attach(model), [], 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps + 1)
    sync.bind(optimizer)
    for step in range(steps):
        if slow:
            time.sleep(random.random() * 0.003)
        loss = module(batch(comm.rank, step)).square().mean()
        losses.append(loss.item())
        loss.backward()
        sync.finish_for_update()
        stalled += isinstance(sync, Ahead) and sync._pending
        sync.update(optimizer)
        schedule.step()
        if lone and step == 10 and comm.rank == 0:
            optimizer.state_dict()
    sync.synchronize()
    found = {
        "weights": [parameter.detach().clone() for parameter in model.parameters()],
        "state": copy.deepcopy(optimizer.state_dict()["state"]),
        "losses": losses,
        "went on": stalled,
        "about": sync.describe() if isinstance(sync, Ahead) else "",
    }
    sync.detach()
    return found


def assert_equal_bits(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(found):
        assert result["losses"] == expected[rank]["losses"]
        for one, other in zip(result["weights"], expected[rank]["weights"], strict=True):
            assert torch.equal(one, other)
        for number, state in result["state"].items():
            for key, value in state.items():
                assert torch.equal(value, expected[rank]["state"][number][key]), key


def on_two_hosts(**options: Any) -> list[dict[str, Any]]:
    return on_threads(4, lambda comm, log: train(comm, log, **options), hosts=HOSTS, deadline_s=40)


def on_either_side(monkeypatch: pytest.MonkeyPatch, *, barrier: bool) -> None:
    """Users leave the barrier to the prediction; a test must not."""
    init = AheadBetweenLeaders.__init__
    monkeypatch.setattr(
        AheadBetweenLeaders, "__init__", lambda self, comm, **options: init(self, comm, barrier=barrier, **options)
    )


@pytest.mark.parametrize("slow", [False, True])
def test_equals_the_same_without_it_to_the_bit(slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts: a sum of two numbers has one order, so chunks may differ from buckets."""
    on_either_side(monkeypatch, barrier=False)
    ahead = on_two_hosts(ahead=True, bucket_cap_mb=CHUNK_MB, slow=slow, lone=True)
    assert_equal_bits(ahead, on_two_hosts(bucket_cap_mb=CHUNK_MB))
    assert all(result["went on"] == 15 for result in ahead), "only the first step has a barrier"
    assert "predicted" in ahead[0]["about"]


@pytest.mark.parametrize("hosts", [[0, 0, 1, 2], [0, 1, 2], [0, 0, 0]])
def test_equals_its_barrier_on_any_hosts(hosts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Three leaders and ranks in uneven numbers; one rank a host; one host."""
    found, options = [], {"ahead": True, "bucket_cap_mb": CHUNK_MB}
    for barrier in (False, True):
        with monkeypatch.context() as patch:
            on_either_side(patch, barrier=barrier)
            found.append(on_threads(len(hosts), lambda c, g: train(c, g, **options), hosts=hosts, deadline_s=40))
    assert_equal_bits(*found)


def test_mean_that_is_not_copied_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a rank that takes its own host's part for the mean."""
    on_either_side(monkeypatch, barrier=False)
    monkeypatch.setattr(AheadBetweenLeaders, "_land", lambda self, number: None)
    ahead = on_two_hosts(ahead=True, bucket_cap_mb=CHUNK_MB)
    with pytest.raises(AssertionError):
        assert_equal_bits(ahead, on_two_hosts(bucket_cap_mb=CHUNK_MB))


def test_every_rank_notes_its_transfers() -> None:
    def labels(comm: Communicator, log: EventLog) -> set[str]:
        train(comm, log, ahead=True, bucket_cap_mb=CHUNK_MB, steps=6)
        return {
            record["label"]
            for record in log.records
            if record["kind"] == "collective" and "bucket " in record["label"]
        }

    found = on_threads(4, labels, hosts=HOSTS)
    assert found[0] == found[1] == found[2] == found[3]
    assert len(found[0]) > 2


def on_two_hosts_of_processes(options: dict[str, Any]) -> dict[str, Any]:
    """Four processes, of which launch says that they are on two hosts."""
    place = placement_from_environment()
    assert place is not None
    backend = connect(replace(place, host_index=place.rank // 2), backend="gloo", deadline=timedelta(seconds=30))
    log = EventLog(rank=place.rank, world_size=place.world_size)
    communicator = instrumented(backend, log, deadline_s=30)
    found = train(communicator, log, slow=True, **options)
    communicator.close()
    return found


def test_processes_over_gloo() -> None:
    options = {"bucket_cap_mb": CHUNK_MB}
    found = [
        syncline.launch(on_two_hosts_of_processes, {**options, "ahead": ahead}, workers=4, threads=1)
        for ahead in (True, False)
    ]
    assert_equal_bits(*found)
    assert all(result["about"] for result in found[0])


def test_emulated_hosts_end_with_the_same_weights(tmp_path: Path) -> None:
    """Two hosts of two ranks, over a link that is slow enough for transfers to go on."""
    plan = {"model": "cnn", "data": "synthetic", "hosts": 2, "workers": 4, "link": "50mbit", "threads": 1}
    plan |= {"global_batch": 16, "steps": 18, "settings": {"evaluate": False, "measure.calibration": 0}}
    digests = {}
    for name, options in (("plain", {}), ("ahead", {"options.ahead": True})):
        settings = {**plan["settings"], **options}  # type: ignore[dict-item]
        given = {**plan, "method": "hierarchical", "settings": settings, "run_dir": tmp_path / name}
        summary = syncline.train(**given).summary  # type: ignore[arg-type]
        digests[name] = summary["weights_sha256"]
        assert (summary["predicted"] is not None) == (name == "ahead")
    assert digests["plain"] == digests["ahead"]
    predicted = summary["predicted"]
    assert 0 < predicted["bound_s"] <= 1.001 * predicted["step_s"]
    assert predicted["measured_s"] > 0


def test_contradiction_is_refused() -> None:
    with pytest.raises(PlanError, match="leave out overlap"):
        parse_plan({"method": "hierarchical", "options": {"ahead": True, "overlap": False}})
    with pytest.raises(PlanError, match="ahead=True needs the optimizer"):
        syncline.DataParallel(nn.Linear(2, 2), "hierarchical", ahead=True)
    with pytest.raises(PlanError, match="method bucketed has no option ahead"):
        parse_plan({"method": "bucketed", "options": {"ahead": True}})
