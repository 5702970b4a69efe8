"""Ranks that call different things: an error that says what each calls, at once, and no hang."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers import caught, on_processes, on_threads

from syncline.comm import Communicator
from syncline.errors import CommunicationError, ContractError, DeadlineError, PeerLostError
from syncline.spans import EventLog

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
"""Both ranks call with what stands here for their rank; what the error says of each."""


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
    assert "rank 0 calls transfer float32 [3] at " in str(error)
    assert "; rank 1 calls transfer int64 [3] at " in str(error)


def deviate_in_step_2(comm: Communicator, log: EventLog) -> CommunicationError | None:
    def steps() -> None:
        for log.step in range(4):
            with comm.scope("gradients"):
                deviates = log.step == 2 and comm.rank == 1
                comm.all_reduce(torch.ones(3, dtype=torch.int64 if deviates else torch.float32), label="bias")

    return caught(steps)


@pytest.mark.usefixtures("quick_stalls")
def test_mismatch_that_appears_in_a_later_step_is_found() -> None:
    error = on_threads(2, deviate_in_step_2, deadline_s=5)[1]
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
