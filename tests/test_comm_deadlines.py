"""Ranks that are late, lost or leave: an error that names the place and who is missing."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
from helpers import caught, on_processes, on_threads

from syncline.comm import Communicator
from syncline.comm.torch_backend import translate
from syncline.errors import CommunicationError, DeadlineError, PeerLostError
from syncline.spans import EventLog


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
    assert_rank_2_is_missed(on_threads(3, lambda comm, log: leave_rank_2_out(comm, log, known), deadline_s=4))


@pytest.mark.parametrize("known", [False, True])
def test_deadline_over_gloo_names_place_and_missing_rank(known: bool) -> None:
    assert_rank_2_is_missed(on_processes(3, lambda comm, log: leave_rank_2_out(comm, log, known), deadline_s=6))


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
            time.sleep(2)  # rank 1's deadline passes first, and it is gone when rank 0 looks
        with comm.scope("gradients"):
            error = caught(lambda: comm.all_reduce(torch.ones(3)))
        comm.store.set(f"given up {comm.rank}", "")
        comm.store.wait(["given up 0"], timedelta(seconds=60))
        return error

    errors = on_threads(3, live, deadline_s=4)
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

    error = on_threads(3, live, deadline_s=3)[0]
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
    assert "rank 1 has finished; rank 0 waits." in str(error)
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
