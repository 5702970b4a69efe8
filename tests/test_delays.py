"""Delays on purpose: on the rank, in the phase and in the steps that the plan names, and nowhere else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers import on_threads
from test_step import make_worker, shard_of

from syncline.comm import Communicator
from syncline.errors import PlanError
from syncline.plan import Plan, parse_plan
from syncline.spans import EventLog
from syncline.training import delays
from syncline.training.delays import delays_of
from syncline.training.step import train_step


@pytest.mark.parametrize("phase", ["data", "forward", "backward", "update"])
def test_pause_is_in_its_phase_on_its_rank_in_its_steps(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(workers=2, inject={"rank": 1, "phase": phase, "delay_ms": 150, "every": 2})

    def enter(self: delays.Delayed) -> None:
        self._span.__enter__()
        self._span.log.add("pause", phase=self._span.name, seconds=self._seconds)

    monkeypatch.setattr(delays.Delayed, "__enter__", enter)

    def live(comm: Communicator, log: EventLog) -> list[tuple[str, float, int]]:
        ready = make_worker("cnn", "all-reduce", comm, log)
        worker = replace(ready, delays=delays_of(plan, comm.rank))
        for log.step in range(-1, 3):
            train_step(worker, shard_of(comm, 4, 0))
        return [(one["phase"], one["seconds"], one["step"]) for one in log.records if one["kind"] == "pause"]

    assert on_threads(2, live) == [[], [(phase, 0.15, 0), (phase, 0.15, 2)]]


def test_pause_counts_as_part_of_the_phase() -> None:
    log = EventLog()
    with delays.Delayed(log.span("data"), 0.02):
        pass
    (record,) = log.records
    assert (record["end"] - record["start"]) / 1e9 >= 0.02


def test_no_rank_is_slowed_unless_asked() -> None:
    assert delays_of(Plan(workers=2), 0).pause_s("backward", 0) == 0
    assert [Plan(workers=2, threads=3).threads_of(rank) for rank in range(2)] == [3, 3]
    slowed = Plan(workers=2, threads=3, inject={"rank": 1, "threads": 1})
    assert [slowed.threads_of(rank) for rank in range(2)] == [3, 1]


@pytest.mark.parametrize(
    ("inject", "words"),
    [
        ({"rank": 2, "delay_ms": 1}, ["inject.rank is 2", "2 workers"]),
        ({"rank": 0, "phase": "sync"}, ["inject.phase", "'sync'", "backward"]),
        ({"rank": 0, "delay_ms": -1}, ["inject.delay_ms", "-1"]),
    ],
)
def test_wrong_injection_is_refused(inject: dict[str, object], words: list[str]) -> None:
    with pytest.raises(PlanError) as refused:
        parse_plan({"workers": 2, "inject": inject})
    assert [word for word in words if word not in str(refused.value)] == []
