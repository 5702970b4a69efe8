"""What stands beside a result: one rule for every run."""

from __future__ import annotations

from typing import Any

import pytest

from syncline.launcher.emulation.link_check import LinkCheck
from syncline.marks import ON_LINKS, ON_LOOPBACK, REPLAYED, STRETCHED, Mark, marks_of
from syncline.plan import Plan

CARRIED = LinkCheck([1e9], [1e9]).as_dict()
SLOW = LinkCheck([1e10], [2e9]).as_dict()


@pytest.mark.parametrize(
    ("plan", "link", "expected"),
    [
        ({"workers": 2}, None, []),
        ({"workers": 3}, None, [STRETCHED]),
        ({"workers": 1, "threads": 4}, None, [STRETCHED]),
        ({"workers": 4, "hosts": 2}, None, []),
        ({"workers": 6, "hosts": 2}, None, [STRETCHED]),
        ({"workers": 4, "hosts": 2, "link": "1gbit"}, CARRIED, [STRETCHED]),
        ({"workers": 4, "hosts": 2}, CARRIED, [STRETCHED]),
        ({"workers": 2, "hosts": 2}, SLOW, [Mark("link", SLOW["note"])]),
        ({"workers": 9, "compute": "replay:x"}, None, [ON_LOOPBACK]),
        ({"workers": 9, "hosts": 9, "compute": "replay:x"}, SLOW, [ON_LINKS, Mark("link", SLOW["note"])]),
        ({"workers": 1, "compute": "sleep:x"}, None, [REPLAYED]),
    ],
)
def test_every_run_is_marked_by_one_rule(
    plan: dict[str, Any], link: dict[str, Any] | None, expected: list[Mark]
) -> None:
    """On machines of two cores: shared cores, slept compute, slow links."""
    assert marks_of(Plan(**plan), 2, link) == expected


def test_machines_of_another_launcher_bring_their_cores() -> None:
    assert marks_of(Plan(workers=4), 2, machines=2) == []
    assert marks_of(Plan(workers=4), 2, machines=1) == [STRETCHED]


def test_mark_is_stored_as_its_sentence() -> None:
    for mark in (STRETCHED, REPLAYED, ON_LINKS, Mark("link", SLOW["note"])):
        assert Mark.parse(str(mark)) == mark
