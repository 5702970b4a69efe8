"""Steps that took far longer than the others: named with their cause, and left out of means and advice."""

from __future__ import annotations

from pathlib import Path

import pytest
from event_logs import Line, header, phase, rank_step, span, step_of, write_log

from syncline.accounting.explanation import explain
from syncline.accounting.outliers import Outliers, find_outliers
from syncline.accounting.selection import look_at
from syncline.events import RankStep, Step, Steps
from syncline.plan import Plan
from syncline.store import Run, create_run


def usual(rank: int, at: float = 0.0, **longer: float) -> RankStep:
    """data 4, forward 10, backward 20, sync 2, update 4: 40 ms, and more in some of them."""
    now, phases = at, {}
    for name, length in (("data", 4), ("forward", 10), ("backward", 20), ("sync", 2), ("update", 4)):
        end = now + length + longer.get(name, 0.0)
        phases[name], now = (now, end), end
    return rank_step(rank, phases, start=at, end=now)


def found_in(steps: list[Step], loader_starts: set[int] | None = None) -> list[Outliers]:
    if not steps:
        return []
    looked = look_at(Steps.of(steps))
    usual = [looked.breakdowns[index] for index in looked.usual]
    return find_outliers(looked.slow, usual, loader_starts or set(), counted=len(steps), usual_s=looked.usual_s)


def with_slow_steps(slow: dict[int, dict[str, float]], count: int = 20) -> list[Step]:
    return [
        step_of(usual(0, 1000.0 * number), usual(1, 1000.0 * number, **slow.get(number, {})), number=number)
        for number in range(count)
    ]


def test_slow_first_steps_of_epochs_are_the_loaders() -> None:
    (one,) = found_in(with_slow_steps({5: {"data": 400}, 10: {"data": 300}, 15: {"data": 350}}), {5, 10, 15})
    assert (one.steps, one.counted, one.part, one.rank) == ([5, 10, 15], 20, "data", 1)
    assert one.loader_starts
    assert (one.step_s, one.usual_s) == (pytest.approx(0.39), pytest.approx(0.04))
    assert one.lost_s == pytest.approx(1.05 / 20)


def test_causes_are_told_apart_and_the_dearest_comes_first() -> None:
    update, data = found_in(with_slow_steps({3: {"data": 100}, 4: {"update": 900}}), {7})
    assert (update.steps, update.part, update.loader_starts) == ([4], "update", False)
    assert (data.steps, data.part, data.loader_starts) == ([3], "data", False)


@pytest.mark.parametrize(
    "steps",
    [
        [],
        with_slow_steps({}),
        with_slow_steps({3: {"data": 30}}),  # not twice as long
        with_slow_steps({number: {"data": 400} for number in range(0, 20, 4)} | {1: {"data": 400}}),  # 6 of 20
        with_slow_steps({1: {"data": 400}}, count=4),
    ],
    ids=["no steps", "equal", "a little slow", "often", "few steps"],
)
def test_no_outlier(steps: list[Step]) -> None:
    assert found_in(steps) == []


def lines(rank: int, slow: dict[int, float]) -> list[Line]:
    found, now = [header(rank, 1)], 0.0
    for number in range(21):
        data = 2.0 + slow.get(number, 0.0)
        start = now
        for name, length in (("data", data), ("forward", 10.0), ("backward", 20.0), ("update", 8.0)):
            found.append(phase(name, number, now, now + length, "single"))
            now += length
        if number in slow:
            found.append({"kind": "loader", "started": 2, "step": number, "method": "single"})
        found.append(span("step", number, start, now, "single"))
    return found


def test_advice_is_for_the_usual_step_and_the_loader_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With means over all steps this was 79 % data, and the advice to load ahead, which this loop does."""
    from syncline.report.explained import show_explanation

    plan = Plan(method="single", workers=1, measure={"warmup": 1})
    create_run(tmp_path / "run", kind="record", plan=plan, label="x")
    write_log(tmp_path / "run", 0, lines(0, {7: 1000.0, 14: 1000.0, 20: 1000.0}))
    explanation = explain(Run(tmp_path / "run"))
    (method,) = explanation.methods
    assert (method.breakdown.steps, method.breakdown.step_s) == (17, pytest.approx(0.04))
    assert "data" not in {advice.rule for advice in method.advice}
    (one,) = [advice for advice in method.advice if advice.rule == "slow steps"]
    assert one.text.startswith("3 of 20 steps (7, 14, 20) took 1.04 s instead of 40.0 ms, because the data loader")
    assert "persistent_workers=True" in one.text
    assert one.saves_s == pytest.approx(0.15)
    show_explanation(explanation)
    shown = " ".join(capsys.readouterr().out.split())
    assert "Outliers: 3 of 20 steps (7, 14, 20) took 1.04 s, 26.0 times the usual 40.0 ms: data, where the" in shown
