"""Contention: real steps against bare ones, on made-up times; what counts as noise, and the sentence for people."""

from __future__ import annotations

from pathlib import Path

import pytest

from syncline.accounting.contention import Contention, bare_times, contention, describe
from syncline.events import read_events
from syncline.spans import EventLog

BARE = {
    0: {"forward": [0.1, 0.1, 0.1], "backward": [0.20, 0.21, 0.20], "update": [0.01] * 3},
    1: {"forward": [0.1, 0.1, 0.1], "backward": [0.22, 0.22, 0.22], "update": [0.01] * 3},
}
REAL = {
    0: {"forward": [0.1, 0.1], "backward": [0.35, 0.35], "update": [0.01] * 2},
    1: {"forward": [0.1, 0.1], "backward": [0.37, 0.37], "update": [0.01] * 2},
}


def found(bare: object = BARE, real: object = REAL) -> Contention:
    result = contention(bare, real)  # type: ignore[arg-type]
    assert result is not None
    return result


def test_backward_that_communication_slowed_is_told_and_the_rest_is_not() -> None:
    result = found()
    backward = result.phases["backward"]
    assert (backward.bare_s, backward.real_s) == (pytest.approx(0.21), pytest.approx(0.36))
    assert result.slowed_s == pytest.approx(0.15)
    assert result.steps == 3
    text = describe(result, hidden_s=0.05)
    assert text.startswith("Hidden communication is not free")
    assert "backward by 150 ms (210 ms bare, 360 ms in steps)" in text
    assert "forward" not in text
    assert "Hidden" not in describe(result, hidden_s=0.0)


def test_difference_inside_the_spread_is_none() -> None:
    noisy = {rank: {**times, "backward": [0.1, 0.2, 0.4, 0.5]} for rank, times in REAL.items()}
    result = found(real=noisy)
    assert result.phases["backward"].slowed_s == pytest.approx(0.09)
    assert result.slowed_s == 0
    assert "does not slow compute" in describe(result, hidden_s=0.05)


def test_faster_steps_are_no_contention() -> None:
    result = found(bare=REAL, real=BARE)
    assert result.slowed_s == 0
    assert "does not slow compute" in describe(result, hidden_s=0.05)


def test_nothing_to_compare_is_said() -> None:
    assert contention({}, REAL) is None
    assert contention(BARE, {0: REAL[0]}) is None
    assert contention({0: {}}, {0: {}}) is None
    assert "measure.calibration" in describe(None, hidden_s=0.1)
    assert "replayed from x" in describe(found(), hidden_s=0.1, compute="replayed from x")


def test_calibration_is_read_from_the_logs_by_rank(tmp_path: Path) -> None:
    for rank in range(2):
        log = EventLog(tmp_path / "events" / f"rank-{rank}.jsonl", rank=rank, world_size=2)
        for turn in range(2):
            times = {"data": 1, "forward": 10**6 * (turn + 1), "backward": 10**7 * (rank + 1), "rest": 1, "update": 5}
            log.add("calibration", turn=turn, **times)
        log.add("phase", name="forward", start=1, end=2)
        log.close()
    assert bare_times(read_events(tmp_path)) == {
        rank: {"forward": [0.001, 0.002], "backward": [0.01 * (rank + 1)] * 2, "update": [5e-9] * 2}
        for rank in range(2)
    }
