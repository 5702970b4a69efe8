"""hierarchical: the mean is exact wherever the ranks are, only leaders send, and launch says who shares a host."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
from helpers import (
    assert_same,
    expected_mean,
    gradients,
    integer_loss,
    integer_model,
    on_threads,
)
from torch import Tensor, nn

import syncline
from syncline.comm import Communicator, instrumented
from syncline.comm import shared_memory as memory
from syncline.comm.shared_memory import ranks_by_host
from syncline.comm.threads import run_threads
from syncline.comm.torch_backend import connect
from syncline.errors import ContractError, PeerLostError, PlanError
from syncline.launcher.adopt import placement_from_environment
from syncline.spans import EventLog
from syncline.sync import make_sync

HOSTS = {
    "two by two": [0, 0, 1, 1],
    "uneven": [0, 0, 0, 1],
    "one host": [0, 0, 0, 0],
    "one rank a host": [0, 1, 2, 3],
    "interleaved": [0, 1, 0, 1],
    "three ranks": [0, 0, 1],
    "not from zero": [7, 7, 3],
}
MODELS = ("tied", "channels-last")
TINY = 1e-4
OPTIONS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "tiny buckets": {"bucket_cap_mb": TINY},
    "after backward": {"bucket_cap_mb": TINY, "overlap": False},
    "ring": {"bucket_cap_mb": TINY, "collective": "ring"},
    "direct": {"collective": "direct"},
}


def steps(comm: Communicator, log: EventLog, model_name: str, options: dict[str, Any]) -> list[dict[str, Tensor]]:
    """The gradients of three steps: the layout changes after the first."""
    model = integer_model(model_name)
    sync = make_sync("hierarchical", comm, log=log, **options)
    module = sync.attach(model)
    found = []
    for turn in range(3):
        model.zero_grad()
        integer_loss(module, comm.rank, turn).backward()
        sync.finish()
        found.append(gradients(model))
    sync.detach()
    return found


def mean_of(model_name: str, world_size: int, turn: int) -> dict[str, Tensor]:
    model = integer_model(model_name)
    for rank in range(world_size):
        integer_loss(model, rank, turn).backward()
    return {name: gradient / world_size for name, gradient in gradients(model).items()}


@pytest.mark.parametrize("place", HOSTS)
def test_mean_is_exact_wherever_the_ranks_are(place: str) -> None:
    hosts = HOSTS[place]
    by_rank = on_threads(
        len(hosts), lambda comm, log: {name: steps(comm, log, name, {}) for name in MODELS}, hosts=hosts
    )
    for found in by_rank:
        for name, turns in found.items():
            for turn, one in enumerate(turns):
                assert_same(one, mean_of(name, len(hosts), turn))


@pytest.mark.parametrize("place", ["two by two", "three ranks"])
@pytest.mark.parametrize("options", OPTIONS)
def test_mean_is_exact_with_every_option(options: str, place: str) -> None:
    hosts = HOSTS[place]
    for turns in on_threads(len(hosts), lambda comm, log: steps(comm, log, "cnn", OPTIONS[options]), hosts=hosts):
        for turn, one in enumerate(turns):
            assert_same(one, mean_of("cnn", len(hosts), turn))


def test_16_bit_transfers_are_the_same_on_every_rank() -> None:
    def live(comm: Communicator, log: EventLog) -> dict[str, Tensor]:
        return steps(comm, log, "mlp", {"transfer_dtype": "bf16", "bucket_cap_mb": TINY})[2]

    found = on_threads(4, live, hosts=HOSTS["two by two"])
    for one in found:
        assert_same(one, found[0])
        for name, tensor in mean_of("mlp", 4, 2).items():
            assert torch.allclose(one[name], tensor, rtol=2**-6, atol=2**-6 * float(tensor.abs().max()))


def test_leaders_send_every_gradient_once_and_others_nothing() -> None:
    def live(comm: Communicator, log: EventLog) -> tuple[Counter[str], int]:
        model = integer_model("mlp")
        sync = make_sync("hierarchical", comm, log=log)
        module = sync.attach(model)
        log.records.clear()
        integer_loss(module, comm.rank).backward()
        sync.finish()
        sent = [
            record
            for record in log.records
            if record["kind"] == "collective" and re.match(r"bucket \d", record["label"])
        ]
        return Counter(record["name"] for record in sent), sum(record["bytes"] for record in sent)

    size = sum(parameter.numel() + 1 for parameter in integer_model("mlp").parameters()) * 4
    found = on_threads(4, live, hosts=HOSTS["two by two"])
    assert [set(names) for names, _ in found] == [{"all_reduce"}, {"shared_memory"}] * 2
    assert [num_bytes for _, num_bytes in found] == [size] * 4, "gradients, and one flag a parameter"


def test_ranks_of_a_host_come_from_launch() -> None:
    assert run_threads(5, ranks_by_host, hosts=[1, 0, 1, 0, 2])[3] == [[1, 3], [0, 2], [4]]


def test_ranks_said_to_share_a_host_must_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher that takes two machines for one is found out before anything is shared."""
    numbers = iter(range(100))
    monkeypatch.setattr(memory, "_identity", lambda host_index: [host_index, next(numbers)])
    with pytest.raises(PlanError, match=r"should be on one host.*Use method bucketed"):
        run_threads(2, ranks_by_host)


def test_parameter_that_one_rank_does_not_use_is_named() -> None:
    def live(comm: Communicator, _: EventLog) -> None:
        model = integer_model("mlp")
        forgotten = nn.Parameter(torch.ones(2))
        model.register_parameter("forgotten", forgotten)
        sync = make_sync("hierarchical", comm)
        loss = integer_loss(sync.attach(model), comm.rank)
        (loss if comm.rank == 3 else loss + forgotten.sum()).backward()
        sync.finish()

    with pytest.raises(ContractError, match=r"forgotten.*not on 3"):
        on_threads(4, live, hosts=HOSTS["two by two"])


def test_rank_without_a_batch_takes_part_with_zeros() -> None:
    def live(comm: Communicator, _: EventLog) -> dict[str, Tensor]:
        model = integer_model("cnn")
        sync = make_sync("hierarchical", comm)
        module = sync.attach(model)
        if comm.rank == 1:
            sync.finish_without_gradients()
        else:
            integer_loss(module, comm.rank).backward()
            sync.finish()
        return gradients(model)

    model = integer_model("cnn")
    for rank in (0, 2, 3):
        integer_loss(model, rank).backward()
    expected = {name: gradient / 4 for name, gradient in gradients(model).items()}
    for found in on_threads(4, live, hosts=HOSTS["two by two"]):
        assert_same(found, expected)


def test_rank_of_a_part_that_is_gone_keeps_its_number() -> None:
    said: list[str] = []

    def live(comm: Communicator) -> None:
        part = comm.part("pairs", [[0, 1], [2, 3]])
        assert part is not None
        assert list(part.ranks) == ([0, 1] if comm.rank < 2 else [2, 3])
        if comm.rank == 3:
            raise KeyError("gone")
        try:
            part.all_reduce(torch.ones(1))
        except PeerLostError as error:
            said.append(error.message)

    with pytest.raises(KeyError, match="gone"):
        run_threads(4, live)
    assert said == ["rank 3 has left."], "the other pair was not disturbed"


def on_two_hosts_of_processes() -> list[dict[str, Tensor]]:
    """Four processes, of which launch says that they are on two hosts."""
    place = placement_from_environment()
    assert place is not None
    deadline = timedelta(seconds=30)
    backend = connect(replace(place, host_index=place.rank // 2), backend="gloo", deadline=deadline)
    log = EventLog(rank=place.rank, world_size=place.world_size)
    communicator = instrumented(backend, log, deadline_s=30)
    found = steps(communicator, log, "channels-last", {"bucket_cap_mb": TINY})
    communicator.close()
    return found


def test_processes_over_gloo() -> None:
    for found in syncline.launch(on_two_hosts_of_processes, workers=4, threads=1):
        for turn, one in enumerate(found):
            assert_same(one, mean_of("channels-last", 4, turn))
    assert_same(mean_of("cnn", 4, 0), expected_mean("cnn", 4))
