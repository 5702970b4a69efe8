"""The machine's load is looked at before anything is measured: go, wait or refuse."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from conftest import Cli
from test_cli import SMALL, assert_refused

from syncline import readiness
from syncline.errors import PlanError, UsageError
from syncline.launcher.doctor import examine_load
from syncline.machine import MachineLoad, sample_load
from syncline.readiness import make_ready
from syncline.voice import Voice

IDLE, SOME, OVERLOADED = MachineLoad(0.02, 0.3), MachineLoad(0.4, 1.2), MachineLoad(1.0, 25.0)
ALOUD = Voice("all")


def looks(*loads: MachineLoad | None) -> Callable[[], MachineLoad | None]:
    left = iter(loads)
    return lambda: next(left)


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)


def test_an_idle_machine_needs_no_word(capsys: pytest.CaptureFixture[str]) -> None:
    for when in ("go", "wait", "refuse"):
        make_ready(when, ALOUD, sample=looks(IDLE))
        make_ready(when, ALOUD, sample=looks(None))
    assert capsys.readouterr() == ("", "")


def test_going_on_is_said_before_it_begins(capsys: pytest.CaptureFixture[str]) -> None:
    make_ready("go", ALOUD, sample=looks(OVERLOADED))
    said = capsys.readouterr().err
    assert "load 25 on 2 cores, 100% in use: results would be worthless. Going on" in said
    make_ready("go", ALOUD, sample=looks(SOME))
    assert "load 1 on 2 cores, 40% in use: results would be doubtful" in capsys.readouterr().err


def test_a_library_caller_who_hears_nothing_is_not_held_up() -> None:
    make_ready("go", Voice(), sample=looks())  # no look at all


def test_refusing_names_the_load() -> None:
    with pytest.raises(UsageError, match=r"load 25 on 2 cores, 100% in use: results would be worthless\. .*wait"):
        make_ready("refuse", Voice(), sample=looks(OVERLOADED))


def test_waiting_ends_when_two_looks_find_it_idle(capsys: pytest.CaptureFixture[str]) -> None:
    pauses: list[float] = []
    busy = [OVERLOADED] * 13
    make_ready("wait", ALOUD, sample=looks(*busy, IDLE, SOME, IDLE, IDLE), sleep=pauses.append)
    assert len(pauses) == 16
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("load 25 on 2 cores, 100% in use: results would be worthless. Waiting until")
    assert said[1].startswith("still waiting after 1 min 0 s: load 25")
    assert said[-1] == "idle after 1 min 20 s; starting"


def test_waiting_has_an_end() -> None:
    with pytest.raises(UsageError, match=r"still busy after 10\.00 s\. .*--when-busy go"):
        make_ready("wait", Voice(), sample=lambda: OVERLOADED, sleep=lambda _: None, patience_s=10)


def test_other_words_are_refused() -> None:
    with pytest.raises(PlanError, match=r"--when-busy 'later' is unknown\. Choose from go, wait, refuse\."):
        make_ready("later", Voice(), sample=looks(IDLE))


def test_doctor_looks_at_the_load_first() -> None:
    found = examine_load(looks(OVERLOADED))
    assert (found.status, found.what) == ("warn", "load")
    assert "results would be worthless" in found.found
    assert "--when-busy wait" in found.fix
    assert examine_load(looks(IDLE)).status == "ok"
    assert examine_load(looks(None)).status == "warn"


def test_this_machine_can_be_looked_at() -> None:
    load = sample_load(0.05)
    assert load is not None
    assert 0 <= load.share <= 1.5  # ticks are coarse
    assert re.fullmatch(r"load \d+ on 2 cores, \d+% in use", str(load))


def test_verbs_do_as_asked(cli: Cli) -> None:
    for verb in (("compare", *SMALL), ("lab", "cs744"), ("scale",), ("doctor",)):
        assert_refused(cli(*verb, "--when-busy", "later"), "--when-busy 'later' is unknown")


def test_what_a_busy_machine_is_agrees_with_what_answers_refuse() -> None:
    from syncline.accounting.doubts import TOO_MUCH_LOAD

    assert readiness.WORTHLESS == TOO_MUCH_LOAD
