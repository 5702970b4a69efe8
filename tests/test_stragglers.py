"""Stragglers in steps made by hand: found with rank, phase, lateness and how often; not found where there is none."""

from __future__ import annotations

from dataclasses import replace

import pytest
from event_logs import rank_step, step_of

from syncline.accounting.breakdown import RankBreakdown, break_down
from syncline.accounting.stragglers import BETWEEN, Straggler, find_disagreement, find_stragglers
from syncline.events import RankInfo, RankStep, Step

LENGTHS = {"data": 10.0, "forward": 20.0, "backward": 50.0, "update": 10.0}


def ranks_of(late: dict[int, dict[str, float]], at: float = 0.0, world_size: int = 4) -> list[RankStep]:
    """A step in which ranks take longer in phases as `late` says; "start" makes a rank begin late."""
    times: dict[int, dict[str, tuple[float, float]]] = {}
    for rank in range(world_size):
        now, phases = at + late.get(rank, {}).get("start", 0.0), {}
        for name in ("data", "forward", "backward"):
            end = now + LENGTHS[name] + late.get(rank, {}).get(name, 0.0)
            phases[name], now = (now, end), end
        times[rank] = phases
    synced = max(phases["backward"][1] for phases in times.values()) + 10
    found = []
    for rank, phases in times.items():
        ready = phases["backward"][1]
        updated = synced + LENGTHS["update"] + late.get(rank, {}).get("update", 0.0)
        whole = {**phases, "sync": (ready, synced), "update": (synced, updated)}
        start = phases["data"][0]
        found.append(rank_step(rank, whole, {"a": (ready, ready, synced)}, start=start, end=updated))
    return found


def found_in(steps: list[Step], threads: dict[int, int] | None = None) -> list[Straggler]:
    infos = {rank: RankInfo(rank, threads=(threads or {}).get(rank, 2)) for rank in steps[0].ranks}
    return find_stragglers(steps, [break_down(step) for step in steps], infos)


def repeated(late: dict[int, dict[str, float]], count: int = 5, world_size: int = 4) -> list[Step]:
    return [step_of(*ranks_of(late, 1000.0 * number, world_size), number=number) for number in range(count)]


@pytest.mark.parametrize("phase", ["data", "forward", "backward"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_rank_that_is_always_late_is_found(phase: str, world_size: int) -> None:
    (one,) = found_in(repeated({1: {phase: 100}}, world_size=world_size))
    assert (one.rank, one.phase, one.late_steps, one.steps) == (1, phase, 5, 5)
    assert one.late_s == pytest.approx(0.1)
    assert one.waited_s == pytest.approx(0.1)
    assert one.waited_share == pytest.approx(0.5)
    assert one.saves_s == pytest.approx(0.1)


def test_rank_that_starts_late_is_held_up_between_steps() -> None:
    (one,) = found_in(repeated({2: {"start": 30}}))
    assert (one.rank, one.phase) == (2, BETWEEN)


def test_late_start_after_a_long_update_is_the_updates() -> None:
    late = [step_of(*ranks_of({0: {"update": 60, "start": 60 if number else 0}}, 300.0 * number), number=number)
            for number in range(5)]  # fmt: skip
    (one,) = found_in(late)
    assert (one.rank, one.phase, one.late_steps) == (0, "update", 4)


def test_how_often_is_counted() -> None:
    steps = [
        step_of(*ranks_of({3: {"backward": 100}} if number % 3 == 0 else {}, 1000.0 * number), number=number)
        for number in range(9)
    ]
    (one,) = found_in(steps)
    assert (one.late_steps, one.steps) == (3, 9)
    assert one.late_s == pytest.approx(0.1)
    assert one.waited_s == pytest.approx(0.1 / 3)


def test_small_lateness_of_others_does_not_hide_a_large_one() -> None:
    steps = [
        step_of(
            *ranks_of({3: {"data": 100}} if number % 2 else {number % 3: {"forward": 8}}, 1000.0 * number),
            number=number,
        )
        for number in range(10)
    ]
    (one,) = found_in(steps)
    assert (one.rank, one.phase, one.late_steps) == (3, "data", 5)


def test_what_a_step_gains_is_the_way_to_the_next_last_rank() -> None:
    (one,) = found_in(repeated({1: {"backward": 100}, 2: {"backward": 70}}))
    assert one.rank == 1
    assert one.late_s == pytest.approx(0.1)
    assert one.saves_s == pytest.approx(0.03)


def test_fewer_threads_are_named() -> None:
    (one,) = found_in(repeated({1: {"backward": 50, "forward": 20}}), threads={1: 1})
    assert one.phase == "backward"
    assert one.has_fewer_threads
    (other,) = found_in(repeated({1: {"backward": 50}}))
    assert not other.has_fewer_threads


@pytest.mark.parametrize(
    "steps",
    [
        repeated({}),
        repeated({1: {"backward": 4}}),  # less than 5 % of a step
        repeated({1: {"backward": 100}}, count=4) [:0],
        [step_of(*ranks_of({number % 4: {"backward": 100}}, 1000.0 * number), number=number) for number in range(8)],
        [step_of(*ranks_of({1: {"backward": 100}} if number < 2 else {}, 1000.0 * number), number=number)
         for number in range(20)],
        repeated({0: {"backward": 100}}, world_size=1),
    ],
    ids=["equal", "a little late", "no steps", "every rank in turn", "twice in twenty", "one rank"],
)  # fmt: skip
def test_no_straggler(steps: list[Step]) -> None:
    assert (found_in(steps) if steps else find_stragglers([], [], {})) == []


def test_rank_that_the_others_wait_for_inside_forward_is_found() -> None:
    """Rank 1 loads 40 longer; the others wait for it where buffers are shared, and all end backward together."""
    steps = []
    for number in range(5):
        at, ranks = 1000.0 * number, []
        for rank in range(3):
            came = at + (50 if rank == 1 else 10)
            phases = {"data": (at, came), "forward": (came, at + 80), "backward": (at + 80, at + 130),
                      "sync": (at + 130, at + 140), "update": (at + 140, at + 150)}  # fmt: skip
            sent = {"buffers": (came, came, at + 52), "a": (at + 130, at + 130, at + 140)}
            ranks.append(rank_step(rank, phases, sent, start=at, end=at + 150))
        steps.append(step_of(*ranks, number=number))
    (one,) = found_in(steps)
    assert (one.rank, one.phase, one.late_steps) == (1, "data", 5)
    assert (one.late_s, one.waited_s) == (pytest.approx(0.04), pytest.approx(0.04))


def test_late_rank_that_nobody_waits_for_is_no_straggler() -> None:
    """Nothing is sent between these ranks, so what one of them does later costs the others nothing."""
    steps = [
        step_of(
            *(replace(own, transfers=()) for own in ranks_of({1: {"backward": 100}}, 1000.0 * number)), number=number
        )
        for number in range(5)
    ]
    assert found_in(steps) == []


def broken(steps: list[Step]) -> list[dict[int, RankBreakdown]]:
    return [break_down(step) for step in steps]


def test_step_times_that_disagree_are_flagged_with_the_cause() -> None:
    """Rank 0 starts 60 late each time: its own step looks short, the others' hold the wait for it."""
    one = find_disagreement(broken(repeated({0: {"start": 60}})))
    assert one is not None
    assert (one.longest_rank, one.shortest_rank, one.part) == (1, 0, "wait")
    assert one.difference_s == pytest.approx(0.06)
    assert (one.longest_s, one.shortest_s) == (pytest.approx(0.16), pytest.approx(0.1))
    slow_update = find_disagreement(broken(repeated({2: {"update": 40}})))
    assert slow_update is not None
    assert (slow_update.longest_rank, slow_update.part) == (2, "update")


def test_step_times_that_agree_are_not_flagged() -> None:
    assert find_disagreement(broken(repeated({1: {"backward": 100}}))) is None
    assert find_disagreement(broken(repeated({0: {"start": 5}}))) is None
    assert find_disagreement([]) is None
    assert find_disagreement(broken(repeated({}, world_size=1))) is None
