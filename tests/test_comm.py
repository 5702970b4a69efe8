"""The Communicator: exact values on threads and on Gloo, whatever tensor is given, and a record of each operation."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from helpers import caught, on_processes, on_threads
from torch import Tensor

from syncline.comm import Communicator, checked
from syncline.comm.communicator import Operation
from syncline.comm.threads import ThreadCommunicator, ThreadWorld, run_threads
from syncline.comm.torch_backend import flat
from syncline.comm.traced import Traced
from syncline.errors import CommunicationError
from syncline.spans import EventLog

WORLD_SIZES = [1, 2, 3, 4]


def own(communicator: Communicator, dtype: torch.dtype = torch.int64) -> Tensor:
    """1, 2, 3 on rank 0; 10, 20, 30 on rank 1; 100, 200, 300 on rank 2: a sum shows who is in it."""
    return torch.tensor([1, 2, 3], dtype=dtype) * 10**communicator.rank


def check_all_reduce(comm: Communicator) -> None:
    ones = int("1" * comm.world_size)
    for dtype in (torch.int64, torch.float32, torch.float64):
        tensor = own(comm, dtype)
        comm.all_reduce(tensor)
        assert tensor.tolist() == [ones, 2 * ones, 3 * ones]


def check_all_reduce_of_channels_last(comm: Communicator) -> None:
    values = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5)
    tensor = (values * (comm.rank + 1)).contiguous(memory_format=torch.channels_last)
    comm.all_reduce(tensor)
    assert torch.equal(tensor, values * sum(range(1, comm.world_size + 1)))
    assert tensor.is_contiguous(memory_format=torch.channels_last)


def check_all_reduce_of_one_number_and_of_none(comm: Communicator) -> None:
    number, nothing = torch.tensor(comm.rank), torch.empty(0)
    comm.all_reduce(number)
    comm.all_reduce(nothing)
    assert number.item() == sum(range(comm.world_size))


def check_all_gather(comm: Communicator) -> None:
    parts = comm.all_gather(own(comm))
    assert [part.tolist() for part in parts] == [[n, 2 * n, 3 * n] for n in (1, 10, 100, 1000)[: comm.world_size]]


def check_broadcast(comm: Communicator) -> None:
    for root in range(comm.world_size):
        tensor = own(comm)
        comm.broadcast(tensor, root=root)
        assert tensor.tolist() == [10**root, 2 * 10**root, 3 * 10**root]


def check_gather(comm: Communicator) -> None:
    for root in range(comm.world_size):
        parts = [torch.zeros(3, dtype=torch.int64) for _ in range(comm.world_size)] if comm.rank == root else None
        tensor = own(comm)
        comm.gather(tensor, parts, root=root)
        assert tensor.tolist() == own(comm).tolist()
        assert parts is None or [int(part[0]) for part in parts] == [10**rank for rank in range(comm.world_size)]


def check_scatter(comm: Communicator) -> None:
    for root in range(comm.world_size):
        parts = [torch.tensor([root, rank]) for rank in range(comm.world_size)] if comm.rank == root else None
        tensor = torch.zeros(2, dtype=torch.int64)
        comm.scatter(tensor, parts, root=root)
        assert tensor.tolist() == [root, comm.rank]


def check_ring_that_sends_first(comm: Communicator) -> None:
    _ring(comm, lambda send, receive: [send(), receive()])


def check_ring_that_receives_first(comm: Communicator) -> None:
    _ring(comm, lambda send, receive: [receive(), send()])


def _ring(comm: Communicator, begin: Callable[..., list[checked.Work]]) -> None:
    """Twice, because a first and a later call take different ways through Checked."""
    right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    for lap in range(2) if comm.world_size > 1 else ():
        with comm.scope("ring"):
            received = torch.zeros(3, dtype=torch.int64)
            sent = own(comm) + lap
            for work in begin(lambda sent=sent: comm.send(sent, right), lambda r=received: comm.receive(r, left)):
                work.wait()
        assert received.tolist() == [10**left + lap, 2 * 10**left + lap, 3 * 10**left + lap]


def check_operations_in_flight_together(comm: Communicator) -> None:
    tensors = [own(comm), own(comm) * 2]
    for work in [comm.start(Operation("all_reduce", tensor)) for tensor in tensors]:
        work.wait()
    assert tensors[1].tolist() == [2 * value for value in tensors[0].tolist()]
    assert int(tensors[0][0]) == int("1" * comm.world_size)


VERBS: dict[str, Callable[[Communicator], None]] = {
    name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")
}


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("verb", VERBS)
def test_verb_on_threads(verb: str, world_size: int) -> None:
    run_threads(world_size, VERBS[verb])
    on_threads(world_size, lambda comm, _: VERBS[verb](comm))


def every_verb(comm: Communicator, _: EventLog) -> list[str]:
    """Both with and without the wrappers, on the same group."""
    for check in VERBS.values():
        check(comm.backend)
        check(comm)
    return list(VERBS)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_verb_on_processes(world_size: int) -> None:
    assert on_processes(world_size, every_verb) == [list(VERBS)] * world_size


def test_receives_that_are_waited_for_out_of_order_keep_their_order() -> None:
    def live(comm: Communicator, _: EventLog) -> list[float]:
        if comm.rank == 0:
            for value in (1.0, 2.0):
                comm.send(torch.full((1,), value), 1).wait()
            return []
        first, second = torch.zeros(1), torch.zeros(1)
        works = [comm.receive(first, 0), comm.receive(second, 0)]
        for work in reversed(works):
            work.wait()
        return [first.item(), second.item()]

    assert on_threads(2, live)[1] == [1.0, 2.0]


def test_own_error_is_raised_and_not_its_echo() -> None:
    def fail_on_rank_1(comm: Communicator) -> None:
        comm.all_reduce(torch.ones(1))
        if comm.rank == 1:
            raise KeyError("own")
        comm.all_reduce(torch.ones(1))

    with pytest.raises(KeyError, match="own"):
        run_threads(3, fail_on_rank_1)


def test_known_signatures_are_not_compared_again() -> None:
    def keys_after(steps: int) -> set[str]:
        def live(comm: Communicator, _: EventLog) -> list[str]:
            for _ in range(steps):
                with comm.scope("gradients"):
                    comm.all_reduce(torch.ones(3))
                    comm.broadcast(torch.ones(2))
                    check_ring_that_sends_first(comm)
            comm.all_reduce(torch.ones(1))
            return list(comm.store.list_keys())  # type: ignore[attr-defined]

        return {key for key in on_threads(3, live)[0] if key.startswith("contract/")}

    once = keys_after(1)
    assert len(once) > 6
    assert keys_after(5) == once


# Tensors and records.


@pytest.mark.parametrize("shape", [(), (0,), (3, 4), (2, 3, 4, 4)])
def test_flat_is_a_view_of_the_same_memory(shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape)
    flat(tensor).fill_(7)
    assert torch.equal(tensor, torch.full(shape, 7.0))


def test_flat_of_channels_last_is_a_view_in_memory_order() -> None:
    tensor = torch.arange(2 * 3 * 4 * 4.0).view(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    assert flat(tensor).tolist() == tensor.permute(0, 2, 3, 1).reshape(-1).tolist()
    assert flat(tensor).data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("tensor", [torch.zeros(6)[::2], torch.zeros(1).expand(3), torch.zeros(4, 4)[:, :2]])
def test_tensor_with_gaps_is_refused(tensor: Tensor) -> None:
    with pytest.raises(CommunicationError, match=r"strides .* is not in one piece"):
        flat(tensor)


def send_tensor_with_gaps(comm: Communicator, _: EventLog) -> str:
    error = caught(lambda: comm.all_reduce(torch.zeros(6)[::2], label="odd"))
    comm.all_reduce(torch.ones(1))
    return str(error)


def test_tensor_with_gaps_is_refused_over_gloo_by_its_label() -> None:
    for text in on_processes(2, send_tensor_with_gaps):
        assert "is not in one piece" in text
        assert "of odd" in text


def test_traced_writes_bytes_and_times_of_each_operation() -> None:
    log = EventLog()
    log.step = 2
    traced = Traced(ThreadCommunicator(ThreadWorld(1), 0), log)
    before = time.monotonic_ns()
    work = traced.start(Operation("all_reduce", torch.ones(10, dtype=torch.float64), label="bias"))
    assert log.records == []
    work.wait()
    traced.all_reduce(torch.ones(3), label="weight", ready_ns=before)
    first, second = log.records
    assert (first["kind"], first["name"], first["label"], first["bytes"]) == ("collective", "all_reduce", "bias", 80)
    assert before <= first["ready"] == first["start"] <= first["end"] <= time.monotonic_ns()
    assert first["step"] == 2
    assert second["bytes"] == 12
    assert second["ready"] == before < second["start"] <= second["end"]


def test_product_communicator_traces_every_verb() -> None:
    def live(comm: Communicator, log: EventLog) -> list[str]:
        for check in VERBS.values():
            check(comm)
        return [record["name"] for record in log.records]

    for names in on_threads(2, live):
        assert set(names) == {"all_reduce", "all_gather", "broadcast", "gather", "scatter", "send", "receive"}
