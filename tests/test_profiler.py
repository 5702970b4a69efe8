"""Operator totals of what the profiler recorded; damaged files are named and left out."""

from __future__ import annotations

import json
from pathlib import Path

from syncline.accounting.usage import operator_totals


def recorded(folder: Path, rank: int, step: int, *operators: tuple[str, int, float, float]) -> None:
    keys = ("name", "calls", "self_us", "total_us")
    content = {"rank": rank, "step": step, "operators": [dict(zip(keys, one, strict=True)) for one in operators]}
    (folder / f"rank-{rank}-step-{step}.json").write_text(json.dumps(content))


def test_totals_are_per_step_and_add_up(tmp_path: Path) -> None:
    assert operator_totals(tmp_path) is None
    folder = tmp_path / "profile"
    folder.mkdir()
    recorded(folder, 0, 3, ("conv", 2, 3000, 5000), ("add", 1, 1000, 1000))
    recorded(folder, 0, 4, ("conv", 4, 5000, 7000))
    (folder / "rank-0-step-5.json").write_text("{")
    found = operator_totals(tmp_path)
    assert found is not None
    assert found.recorded == [(0, 3), (0, 4)]
    assert [(one.name, one.calls, one.self_s, one.total_s) for one in found.operators] == [
        ("conv", 3, 0.004, 0.006),
        ("add", 0.5, 0.0005, 0.0005),
    ]
    assert sum(one.share for one in found.operators) == 1
    assert found.problems == ["rank-0-step-5.json is unreadable and left out"]
