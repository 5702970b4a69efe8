"""The storm of benchmarks/faults.py: its checks can fail, its cases come from the seed, and two of them hold."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import faults  # noqa: E402  a program, not a package

CRASHED, TERMINATED = 2, 8
"""Late enough for a checkpoint, so that the runs are resumed too."""


def test_cases_come_from_seed_and_number() -> None:
    cases = [faults.draw(17, number) for number in range(300)]
    assert cases == [faults.draw(17, number) for number in range(300)]
    assert {case.kind for case in cases} == {*faults.IN_RANK, *faults.ON_LAUNCHER, *faults.ON_HOSTS}
    assert {case.method for case in cases} >= {"single", "ahead", "hierarchical", "shared-memory", "ddp", "tree"}
    assert all(case.rank < case.workers for case in cases)


@pytest.mark.parametrize(
    ("kind", "code", "line", "ended", "named"),
    [
        ("killed", 1, "syncline: [rank 1] killed by SIGKILL.", True, True),
        ("killed", 1, "syncline: [rank 0] killed by SIGKILL.", True, False),
        ("killed", 0, "syncline: [rank 1] ArithmeticError", False, False),
        ("hangs", 1, "syncline: [rank 0] DeadlineError: [rank 0] waited; missing: rank 1.", True, True),
        ("hangs", 1, "syncline: [rank 0] DeadlineError: [rank 0] waited; missing: rank 2.", True, False),
        ("ctrl-c", 130, "syncline: Stopped by Ctrl-C", True, True),
        ("late", 1, "", False, True),
        ("link cut", 1, "syncline: host host0 (node 0, 10.0.0.1) is lost", True, False),
    ],
)
def test_a_wrong_end_and_a_wrong_name_are_seen(kind: str, code: int, line: str, ended: bool, named: bool) -> None:
    case = replace(faults.draw(17, 0), kind=kind, rank=1, workers=3)
    assert faults._ended_well(case, code) is ended
    assert faults._named(case, code, f"earlier\n{line}\n") is named


def test_what_is_left_is_seen(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    memory = set(os.listdir("/dev/shm"))
    assert faults._leftovers(tmp_path, scratch, memory) == []
    (scratch / "socket").touch()
    left = Path("/dev/shm", f"syncline-storm-{os.getpid()}")
    left.touch()
    try:
        assert {*faults._leftovers(tmp_path, scratch, memory)} >= {str(scratch / "socket"), str(left)}
    finally:
        left.unlink()


@pytest.mark.timeout(300)
def test_two_cases_hold(tmp_path: Path) -> None:
    storm = faults.Storm(tmp_path)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(storm.face, [faults.draw(17, CRASHED), faults.draw(17, TERMINATED)]))
    assert [(one.case.kind, one.broken, one.said) for one in found if one.broken] == []
    assert all("bitwise" in one.checks for one in found)
