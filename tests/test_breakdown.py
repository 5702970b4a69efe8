"""The rules of the breakdown, on steps made by hand whose truth is known. Times are milliseconds."""

from __future__ import annotations

import pytest
from event_logs import MS, rank_step, step_of
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.accounting.breakdown import PARTS, RankBreakdown, break_down, summarise
from syncline.events import Pack, Phase, RankStep, Step, Transfer

PHASES = {"data": (1, 5), "forward": (5, 20), "backward": (20, 60), "sync": (60, 80), "update": (80, 95)}


def parts(found: RankBreakdown) -> dict[str, float]:
    """Milliseconds of what is there at all."""
    return {part: duration / MS for part, duration in found.parts.items() if duration}


def test_one_rank_that_sends_nothing() -> None:
    phases = {**PHASES, "sync": (60, 60), "score": (62, 65), "update": (80, 95)}
    found = break_down(step_of(rank_step(0, phases, end=100)))[0]
    assert parts(found) == {"data": 4, "forward": 18, "backward": 40, "update": 15, "other": 23}
    assert (found.hidden, found.waits, found.wire, found.last_ready) == (0, (), {}, 60 * MS)


def test_all_after_backward_is_wire_when_ranks_are_equal() -> None:
    """Ready at 50, backward returns at 60 and nothing moves until then: the user pays from 50 on."""
    buckets = {"a": (40, 61, 70), "b": (50, 70, 79)}
    one, other = (rank_step(rank, PHASES, buckets, end=95) for rank in range(2))
    found = break_down(step_of(one, other))[0]
    assert parts(found) == {"data": 4, "forward": 15, "backward": 30, "wire": 29, "pack": 1, "update": 15, "other": 1}
    assert found.wire == {"a": 20 * MS, "b": 9 * MS}
    assert found.hidden == 0


def test_overlapped_transfer_is_hidden_and_only_the_rest_is_wire() -> None:
    buckets = {"a": (30, 31, 50), "b": (55, 56, 68)}
    one, other = (rank_step(rank, PHASES, buckets, end=95) for rank in range(2))
    found = break_down(step_of(one, other))[0]
    assert found.parts["backward"] == 35 * MS
    assert found.wire == {"b": 13 * MS}
    assert found.hidden == 19 * MS
    assert found.parts["pack"] == 12 * MS  # nothing is pending from 68 to 80


def test_wait_is_charged_to_the_last_rank_and_its_bucket() -> None:
    """Rank 1 is 25 late in backward. Its bucket a is ready at 65, b at 75; transfers end at 70 and 79."""
    early = rank_step(0, PHASES, {"a": (40, 41, 70), "b": (50, 51, 79)}, end=95)
    late_phases = {**PHASES, "backward": (20, 76), "sync": (76, 80)}
    late = rank_step(1, late_phases, {"a": (65, 66, 70), "b": (75, 76, 79)}, end=95)
    found = break_down(step_of(early, late))
    # From 50: a is ready everywhere at 65, so wait until then; then wire to 70; b's wait from 70 to 75, wire to 79.
    assert parts(found[0])["wait"] == 20
    assert [(one.rank, one.bucket, one.duration / MS) for one in found[0].waits] == [(1, "a", 15), (1, "b", 5)]
    assert found[0].wire == {"a": 5 * MS, "b": 4 * MS}
    assert found[1].parts["wait"] == 0
    assert found[1].wire == {"b": 4 * MS}
    assert found[1].parts["backward"] == 55 * MS
    assert found[1].hidden == 4 * MS


def test_instant_is_wire_if_any_pending_bucket_is_ready_everywhere() -> None:
    """b is ready on both ranks although a, which is sent first, is not: the link could work, so it is not wait."""
    early = {"z": (30, 31, 39)}
    first = rank_step(0, PHASES, {**early, "a": (40, 60, 70), "b": (50, 70, 80)}, end=95)
    second = rank_step(1, PHASES, {**early, "a": (59, 60, 70), "b": (45, 70, 80)}, end=95)
    found = break_down(step_of(first, second))[0]
    assert found.parts["wait"] == 0
    assert found.parts["wire"] == 30 * MS


def test_leader_and_follower_call_one_bucket_by_two_labels() -> None:
    leader = rank_step(0, PHASES, {"ring bucket 0": (40, 60, 75)}, end=95)
    follower = rank_step(1, PHASES, {"bucket 0": (55, 60, 76)}, end=95)
    found = break_down(step_of(leader, follower))
    assert [(one.rank, one.bucket, one.duration / MS) for one in found[0].waits] == [(1, "bucket 0", 15)]
    assert found[0].wire == {"bucket 0": 20 * MS}


def test_rank_that_sends_after_backward_is_waited_for_until_its_backward_ends() -> None:
    """Rank 1 has b ready at 45, but offers nothing before its last gradient at 75: that is waiting, not wire."""
    early = rank_step(0, PHASES, {"a": (50, 61, 77), "b": (30, 77, 79)}, end=95)
    late_phases = {**PHASES, "backward": (20, 76), "sync": (76, 80)}
    late = rank_step(1, late_phases, {"a": (75, 76, 77), "b": (45, 77, 79)}, end=95)
    found = break_down(step_of(early, late))
    assert [(one.rank, one.bucket, one.duration / MS) for one in found[0].waits] == [(1, "a", 25)]
    assert found[0].wire == {"a": 2 * MS, "b": 2 * MS}
    assert found[1].parts["wait"] == 0


def test_three_ranks_wait_for_the_last_of_them() -> None:
    ranks = [rank_step(rank, PHASES, {"a": (ready, 60, 75)}, end=95) for rank, ready in enumerate((40, 58, 49))]
    found = break_down(step_of(*ranks))
    assert [[(wait.rank, wait.duration / MS) for wait in one.waits] for one in found.values()] == [
        [(1, 18)],
        [],
        [(1, 9)],
    ]


def test_copying_is_pack_in_backward_and_after_it() -> None:
    buckets = {"a": (50, 60, 75)}
    packs = [
        (25, 49, 6),
        (75, 78, 3),
        (48, 52, 4),
    ]  # added up in backward; after the transfer; across the last gradient
    found = break_down(step_of(rank_step(0, PHASES, buckets, packs, end=95)))[0]
    # 6 + 2 inside backward, 2 after the last gradient, 3 + 2 after the transfer.
    assert parts(found)["pack"] == 15
    assert parts(found)["backward"] == 22
    assert parts(found)["wire"] == 23


def test_gather_and_scatter_of_one_gradient_are_one_bucket() -> None:
    def transfers(ready: int, *times: tuple[str, int, int, int]) -> tuple[Transfer, ...]:
        return tuple(Transfer(name, "w", 8, ready * MS, a * MS, b * MS) for name, ready, a, b in times)

    phases = tuple(Phase(name, a * MS, b * MS) for name, (a, b) in PHASES.items())
    rank_steps = [
        RankStep(rank, 0, 95 * MS, phases, transfers(50, ("gather", 50, 61, 66), ("scatter", 70, 70, 78)))
        for rank in range(2)
    ]
    found = break_down(step_of(*rank_steps))[0]
    assert (found.parts["wire"], found.parts["wait"], found.parts["pack"]) == (28 * MS, 0, 2 * MS)


def test_stamps_of_ddp_lie_inside_backward() -> None:
    """DDP's backward returns after its last transfer; its sync phase is empty."""
    phases = {**PHASES, "backward": (20, 70), "sync": (70, 70)}
    buckets = {"bucket 0": (30, 31, 45), "bucket 1": (50, 52, 66)}
    found = break_down(step_of(rank_step(0, phases, buckets, [(50, 52, 2)], end=95)))[0]
    assert parts(found)["backward"] == 30
    assert parts(found)["wire"] == 14
    assert parts(found)["pack"] == 6  # the division, and torch's copying out of the buckets
    assert found.hidden == 14 * MS


def test_step_without_phases_of_its_own_is_other() -> None:
    found = break_down(step_of(rank_step(0, {"evaluate": (10, 20)}, end=95)))[0]
    assert parts(found) == {"other": 95}


def test_what_is_sent_inside_forward_holds_it_up() -> None:
    """Buffers of rank 0, which comes 6 late, then gradients after backward: nothing is hidden, nobody overlaps."""
    phases = {**PHASES, "forward": (5, 20)}
    early = rank_step(1, phases, {"buffers": (6, 6, 14), "a": (50, 61, 70), "b": (60, 70, 79)}, end=95)
    late = rank_step(0, phases, {"buffers": (12, 12, 13), "a": (50, 61, 70), "b": (60, 70, 79)}, end=95)
    found = break_down(step_of(late, early))
    assert parts(found[1]) == {
        "data": 4, "forward": 7, "wait": 6, "wire": 2 + 19, "backward": 40, "pack": 1, "update": 15, "other": 1
    }  # fmt: skip
    assert [(wait.rank, wait.bucket) for wait in found[1].waits] == [(0, "buffers")]
    assert found[1].wire == {"a": 10 * MS, "b": 9 * MS, "buffers": 2 * MS}
    assert (found[1].hidden, found[1].first_ready, found[0].first_ready) == (0, 6 * MS, 12 * MS)
    assert parts(found[0])["forward"] == 14


def several_averages(late: float = 0.0) -> RankStep:
    """Three backwards in one step, each averaged: 10 data and forward, 20 backward, 5 sync, then 5 update."""
    phases, transfers, now = [], [], 0.0
    for _ in range(3):
        for name, length in (("forward", 10.0), ("backward", 20.0 + late)):
            phases.append(Phase(name, round(now * MS), round((now + length) * MS)))
            now += length
        end = now + 5 + (10.0 if not late else 0.0)
        phases.append(Phase("sync", round(now * MS), round(end * MS)))
        transfers.append(Transfer("shared_memory", "all", 100, *(round(time * MS) for time in (now, now, end))))
        now = end
    phases.append(Phase("update", round(now * MS), round((now + 5) * MS)))
    return RankStep(int(late > 0), 0, round((now + 5) * MS), tuple(phases), tuple(transfers))


def test_step_with_several_averages_has_a_window_for_each() -> None:
    """Rank 1 is 10 late in each backward. Its own wire is 5 each time; rank 0 waits 10 before that."""
    step = step_of(several_averages(), several_averages(10.0))
    found = break_down(step)
    assert parts(found[0]) == {"forward": 30, "backward": 60, "wait": 30, "wire": 15, "update": 5}
    assert parts(found[1]) == {"forward": 30, "backward": 90, "wire": 15, "update": 5}
    assert {wait.rank for wait in found[0].waits} == {1}
    assert found[0].wire == {"all": 15 * MS}
    assert (found[0].hidden, found[1].hidden) == (0, 0)
    summary = summarise([step], [found])
    assert summary is not None
    (bucket,) = summary.buckets
    assert (bucket.wire_s, bucket.duration_s) == (pytest.approx(0.015), pytest.approx(0.005))


def test_means_add_up_and_the_median_is_of_the_slowest_rank() -> None:
    steps = []
    for number in range(3):
        ends = (95, 95 + 10 * number)
        ranks = [rank_step(rank, PHASES, {"a": (50, 60, 75)}, end=ends[rank]) for rank in range(2)]
        steps.append(step_of(*ranks, number=number))
    means = summarise(steps, [break_down(step) for step in steps])
    assert means is not None
    assert means.steps == 3
    assert means.median_s == pytest.approx(0.105)
    assert means.step_s == pytest.approx(0.1)
    assert sum(means.parts_s.values()) == pytest.approx(means.step_s)
    assert [one.step_s for one in means.ranks] == pytest.approx([0.095, 0.105])
    assert [(one.label, one.num_bytes) for one in means.buckets] == [("a", 1000)]
    assert means.buckets[0].wire_s == pytest.approx(0.025)
    assert means.overlap == 0
    assert means.share("wire") == pytest.approx(0.25)
    assert summarise([], []) is None


# Whatever the log says, the parts are a partition.

time_ns = st.integers(-50, 250)


@st.composite
def spans(draw: st.DrawFn) -> tuple[int, int]:
    one, other = draw(time_ns), draw(time_ns)
    return min(one, other), max(one, other)


@st.composite
def rank_steps(draw: st.DrawFn, rank: int) -> RankStep:
    start, end = sorted((draw(st.integers(0, 100)), draw(st.integers(100, 200))))
    names = draw(st.lists(st.sampled_from(["data", "copy", "forward", "backward", "sync", "score", "update", "x"])))
    phases = tuple(Phase(name, *draw(spans())) for name in names)
    labels = draw(st.lists(st.sampled_from("abc"), max_size=5))
    transfers = tuple(Transfer("all_reduce", label, 8, draw(time_ns), *draw(spans())) for label in labels)
    packs = []
    for _ in range(draw(st.integers(0, 3))):
        low, high = draw(spans())
        packs.append(Pack("", low, high, draw(st.integers(0, high - low))))
    return RankStep(rank, start, end, phases, transfers, tuple(packs))


@given(st.integers(1, 3).flatmap(lambda count: st.tuples(*(rank_steps(rank) for rank in range(count)))))
@settings(max_examples=200, deadline=None)
def test_parts_are_a_partition_of_every_ranks_step(ranks: tuple[RankStep, ...]) -> None:
    for rank, found in break_down(Step(0, 0, {one.rank: one for one in ranks})).items():
        assert tuple(found.parts) == PARTS
        assert sum(found.parts.values()) == found.duration == ranks[rank].duration
        assert min(found.parts.values()) >= 0
        assert sum(found.wire.values()) == found.parts["wire"]
        assert sum(wait.duration for wait in found.waits) == found.parts["wait"]
        assert all(wait.rank != rank for wait in found.waits)
        assert 0 <= found.hidden <= found.duration
