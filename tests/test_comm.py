"""The Communicator: exact values on threads and on Gloo, and errors that name what went wrong and where."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
from helpers import caught, on_processes, on_threads
from torch import Tensor

from syncline.comm import Communicator, checked, stall
from syncline.comm.communicator import Operation
from syncline.comm.threads import ThreadCommunicator, ThreadWorld, run_threads
from syncline.comm.torch_backend import flat, translate
from syncline.comm.traced import Traced
from syncline.errors import CommunicationError, ContractError, DeadlineError, PeerLostError
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


# Contracts. Both ranks call with what the table gives for their rank.

FOUR_DIMENSIONAL = torch.ones(2, 3, 4, 4)
MISMATCHES: dict[str, tuple[Callable[[Communicator], None], str, str]] = {
    "dtype": (
        lambda comm: comm.all_reduce(torch.ones(3, dtype=(torch.int64, torch.float32)[comm.rank])),
        "rank 0 calls all_reduce int64 [3]",
        "rank 1 calls all_reduce float32 [3]",
    ),
    "shape": (
        lambda comm: comm.all_reduce(torch.ones(3 + comm.rank)),
        "rank 0 calls all_reduce float32 [3]",
        "rank 1 calls all_reduce float32 [4]",
    ),
    "operation": (
        lambda comm: comm.all_reduce(torch.ones(3)) if comm.rank == 0 else comm.broadcast(torch.ones(3)),
        "rank 0 calls all_reduce float32 [3]",
        "rank 1 calls broadcast root 0 float32 [3]",
    ),
    "root": (
        lambda comm: comm.broadcast(torch.ones(3), root=comm.rank),
        "rank 0 calls broadcast root 0",
        "rank 1 calls broadcast root 1",
    ),
    "strides": (
        lambda comm: comm.all_reduce(
            FOUR_DIMENSIONAL.clone() if comm.rank else FOUR_DIMENSIONAL.contiguous(memory_format=torch.channels_last)
        ),
        "rank 0 calls all_reduce float32 [2, 3, 4, 4] strides [48, 1, 12, 3]",
        "rank 1 calls all_reduce float32 [2, 3, 4, 4]",
    ),
    "send and receive": (
        lambda comm: (
            comm.send(torch.ones(3), 1).wait()
            if comm.rank == 0
            else comm.receive(torch.ones(3, dtype=torch.int64), 0).wait()
        ),
        "rank 0 calls transfer float32 [3]",
        "rank 1 calls transfer int64 [3]",
    ),
}


@pytest.fixture
def quick_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks say within a fraction of a second that they are stuck."""
    monkeypatch.setattr(stall, "STALLED_AFTER_S", 0.1)
    monkeypatch.setattr(stall, "LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(checked, "SURE_AFTER_S", 0.3)


@pytest.mark.parametrize("kind", MISMATCHES)
def test_mismatch_on_threads_names_what_each_rank_calls(kind: str) -> None:
    call, *words = MISMATCHES[kind]

    def live(comm: Communicator, log: EventLog) -> None:
        log.step = 6
        call(comm)

    with pytest.raises(ContractError) as error:
        on_threads(2, live)
    assert [word for word in words if word not in str(error.value)] == []
    assert error.value.step == 6
    assert error.value.rank in (0, 1)


def test_only_one_of_three_ranks_deviates() -> None:
    def live(comm: Communicator, _: EventLog) -> CommunicationError | None:
        return caught(lambda: comm.all_reduce(torch.ones(3 if comm.rank < 2 else 5), label="bias"))

    for rank, error in enumerate(on_threads(3, live)):
        assert isinstance(error, ContractError)
        assert error.rank == rank
        for other, size in enumerate([3, 3, 5]):
            assert f"rank {other} calls all_reduce float32 [{size}]" in str(error)


def every_mismatch(comm: Communicator, _: EventLog) -> dict[str, str]:
    errors = {}
    for kind, (call, *_words) in MISMATCHES.items():
        with comm.scope(kind):
            errors[kind] = str(caught(lambda call=call: call(comm)) if kind != "send and receive" else None)
    return errors


def test_mismatches_over_gloo_are_errors_and_end_no_process() -> None:
    first, second = on_processes(2, every_mismatch)
    for kind, (_, *words) in MISMATCHES.items():
        if kind != "send and receive":
            assert [word for word in words if word not in first[kind] or word not in second[kind]] == []


def transfer_of_another_dtype(comm: Communicator, _: EventLog) -> CommunicationError | None:
    if comm.rank == 0:  # started and left: nobody takes it, so waiting for it would last until the deadline
        work = comm.send(torch.ones(3), 1)
        comm.store.wait(["the receiver has seen it"])
        del work
        return CommunicationError("the receiver says what is wrong")
    error = caught(lambda: comm.receive(torch.ones(3, dtype=torch.int64), 0).wait())
    comm.store.set("the receiver has seen it", "")
    return error


def test_mismatched_transfer_over_gloo_is_an_error_of_the_receiver() -> None:
    error = on_processes(2, transfer_of_another_dtype)[1]
    assert isinstance(error, ContractError)
    assert "rank 0 calls transfer float32 [3]; rank 1 calls transfer int64 [3]" in str(error)


def deviate_in_step_2(comm: Communicator, log: EventLog) -> CommunicationError | None:
    def steps() -> None:
        for log.step in range(4):
            with comm.scope("gradients"):
                deviates = log.step == 2 and comm.rank == 1
                comm.all_reduce(torch.ones(3, dtype=torch.int64 if deviates else torch.float32), label="bias")

    return caught(steps)


@pytest.mark.usefixtures("quick_stalls")
def test_mismatch_that_appears_in_a_later_step_is_found() -> None:
    error = on_threads(2, deviate_in_step_2, deadline_s=2)[1]
    assert isinstance(error, ContractError)
    assert error.step == 2
    assert "rank 0 calls all_reduce float32 [3] as in earlier steps" in str(error)
    assert "rank 1 calls all_reduce int64 [3]" in str(error)


def test_mismatch_that_appears_in_a_later_step_is_found_over_gloo() -> None:
    first, second = on_processes(2, deviate_in_step_2, deadline_s=20)
    assert isinstance(second, ContractError)
    assert "rank 0 calls all_reduce float32 [3] as in earlier steps" in str(second)
    assert isinstance(first, PeerLostError | DeadlineError)


@pytest.mark.usefixtures("quick_stalls")
def test_ranks_in_different_passages_are_told_where_the_other_one_is() -> None:
    def live(comm: Communicator, _: EventLog) -> CommunicationError | None:
        with comm.scope(("gradients", "evaluate")[comm.rank]):
            return caught(lambda: comm.all_reduce(torch.ones(3)))

    errors = on_threads(2, live, deadline_s=10)
    named = [error for error in errors if isinstance(error, ContractError)]
    assert named
    assert all("'gradients'" in str(error) and "'evaluate'" in str(error) for error in named)


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


# Deadlines and lost ranks.


def leave_rank_2_out(comm: Communicator, log: EventLog, known: bool) -> CommunicationError | None:
    log.method = "all-reduce"

    def step(number: int) -> None:
        log.step = number
        with comm.scope("gradients"):
            comm.all_reduce(torch.ones(3), label="conv.bias")

    if known:
        step(0)
    if comm.rank != 2:
        error = caught(lambda: step(1))
        comm.store.set(f"given up {comm.rank}", "")
        return error
    comm.store.wait(["given up 0", "given up 1"], timedelta(seconds=60))
    return None


def assert_rank_2_is_missed(errors: list[CommunicationError | None]) -> None:
    for rank, error in enumerate(errors[:2]):
        assert isinstance(error, DeadlineError)
        assert (error.rank, error.step) == (rank, 1)
        words = ["all_reduce float32 [3] of conv.bias", "method all-reduce", "'gradients'"]
        assert [word for word in words if word not in str(error)] == []
        assert str(error.message).endswith("missing: rank 2.")


@pytest.mark.usefixtures("quick_stalls")
@pytest.mark.parametrize("known", [False, True])
def test_deadline_names_place_and_missing_rank(known: bool) -> None:
    assert_rank_2_is_missed(on_threads(3, lambda comm, log: leave_rank_2_out(comm, log, known), deadline_s=1.5))


@pytest.mark.parametrize("known", [False, True])
def test_deadline_over_gloo_names_place_and_missing_rank(known: bool) -> None:
    assert_rank_2_is_missed(on_processes(3, lambda comm, log: leave_rank_2_out(comm, log, known), deadline_s=3))


def test_deadline_shorter_than_a_poll_does_not_blame_the_ranks_that_came() -> None:
    """Rank 0 finds itself in the first look, and must not then name itself."""
    errors = on_threads(2, lambda comm, _: caught(lambda: comm.all_reduce(torch.ones(3))) if comm.rank == 0 else None,
                        deadline_s=0.1)  # fmt: skip
    assert isinstance(errors[0], DeadlineError)
    assert str(errors[0].message).endswith("missing: rank 1.")


@pytest.mark.usefixtures("quick_stalls")
def test_rank_that_gave_up_first_is_not_missing() -> None:
    def live(comm: Communicator, _: EventLog) -> CommunicationError | None:
        with comm.scope("gradients"):
            comm.all_reduce(torch.ones(3))
        if comm.rank == 2:
            comm.store.wait(["given up 0", "given up 1"], timedelta(seconds=60))
            return None
        if comm.rank == 0:
            time.sleep(0.5)  # rank 1's deadline passes first, and it is gone when rank 0 looks
        with comm.scope("gradients"):
            error = caught(lambda: comm.all_reduce(torch.ones(3)))
        comm.store.set(f"given up {comm.rank}", "")
        comm.store.wait(["given up 0"], timedelta(seconds=60))
        return error

    errors = on_threads(3, live, deadline_s=1.0)
    assert [str(error.message).partition("missing: ")[2] for error in errors[:2] if error] == ["rank 2.", "rank 2."]


@pytest.mark.usefixtures("quick_stalls")
@pytest.mark.parametrize("known", [False, True])
def test_deadline_of_a_receive_names_the_sender_only(known: bool) -> None:
    def live(comm: Communicator, _: EventLog) -> CommunicationError | None:
        for lap in range(1 + known):
            with comm.scope("ring"):
                if comm.rank == 0 and (lap, known) in ((0, False), (1, True)):
                    return caught(lambda: comm.receive(torch.ones(3), 2, label="part").wait())
                if comm.rank == 0:
                    comm.receive(torch.ones(3), 2).wait()
                if comm.rank == 2 and lap < known:
                    comm.send(torch.ones(3), 0).wait()
        return None

    error = on_threads(3, live, deadline_s=0.7)[0]
    assert isinstance(error, DeadlineError)
    assert str(error.message).endswith("missing: rank 2.")
    assert "transfer float32 [3] of part" in str(error)


def test_lost_rank_on_threads_frees_the_others() -> None:
    errors: dict[int, CommunicationError | None] = {}

    def live(comm: Communicator, log: EventLog) -> None:
        comm.all_reduce(torch.ones(3))
        if comm.rank == 1:
            raise KeyError
        log.step = 3
        with comm.scope(""):
            errors[comm.rank] = caught(lambda: comm.all_reduce(torch.ones(3), label="bias"))

    with pytest.raises(KeyError):
        on_threads(3, live)
    for error in errors.values():
        assert isinstance(error, PeerLostError)
        assert error.step == 3
        assert "rank 1 has left" in str(error)
        assert "all_reduce float32 [3] of bias" in str(error)


def leave_early(comm: Communicator, _: EventLog) -> CommunicationError | None:
    comm.all_reduce(torch.ones(3))
    if comm.rank == 1:
        return CommunicationError("left on purpose")
    with comm.scope(""):
        return caught(lambda: [comm.all_reduce(torch.ones(3), label="bias") for _ in range(3)])


def test_lost_process_is_a_lost_peer() -> None:
    error = on_processes(2, leave_early)[0]
    assert isinstance(error, PeerLostError)
    assert "all_reduce float32 [3] of bias" in str(error)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("[../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 3000ms for recv", DeadlineError),
        ("Wait timeout", DeadlineError),
        ("Connection closed by peer [127.0.0.1]:5", PeerLostError),
    ],
)
def test_errors_of_torch_are_translated(text: str, kind: type[CommunicationError]) -> None:
    assert type(translate(RuntimeError(text))) is kind


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
