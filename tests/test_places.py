"""Where ranks run, as flags say it: machines, emulated hosts, this machine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from syncline.cli.compare import DEFAULT, on_several_hosts
from syncline.cli.emulated import _weights_bytes
from syncline.cli.nodes import EMULATED_VARIABLE, Where, marks_beside
from syncline.errors import PlanError, UsageError
from syncline.launcher.emulation.honesty import LINK_VARIABLE, LinkCheck
from syncline.plan import Plan, load_plan


def where(**flags: Any) -> Where:
    names = ("hosts", "workers_per_host", "link", "nodes", "node_rank", "rendezvous")
    return Where(*(flags.get(name) for name in names), flags.get("join_timeout_s", 600.0))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"nodes": 2}, "--node-rank, --rendezvous is missing"),
        ({"nodes": 2, "node_rank": 0}, "--rendezvous is missing"),
        ({"nodes": 2, "node_rank": 0, "rendezvous": "a:1", "hosts": 2}, "--hosts and --link are for emulated hosts"),
        ({"nodes": 2, "node_rank": 0, "rendezvous": "a:1", "link": "1gbit"}, "--hosts and --link"),
        ({"workers_per_host": 2}, "--workers-per-host needs --hosts or --nodes"),
        ({"join_timeout_s": 0.0}, "--join-timeout 0"),
    ],
)
def test_flags_that_contradict_are_refused(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        where(**flags)


@pytest.mark.parametrize(
    ("flags", "given", "expected"),
    [
        ({"hosts": 4}, {}, (4, 4)),
        ({"hosts": 4, "workers_per_host": 2}, {}, (4, 8)),
        ({"nodes": 3, "node_rank": 1, "rendezvous": "a:1"}, {"workers": 6}, (3, 6)),
        ({}, {"workers": 6}, (1, 6)),
    ],
)
def test_workers_are_counted_on_all_hosts(
    flags: dict[str, Any], given: dict[str, Any], expected: tuple[int, int]
) -> None:
    plan = load_plan(None, where(**flags).plan_flags(given))
    assert (plan.hosts, plan.workers) == expected


def test_both_ways_to_count_workers_are_refused() -> None:
    with pytest.raises(PlanError, match="--workers and --workers-per-host"):
        where(hosts=2, workers_per_host=2).plan_flags({"workers": 4})


def test_link_of_a_plan_is_not_ignored_on_machines() -> None:
    node = where(nodes=2, node_rank=0, rendezvous="127.0.0.1:29500")
    with pytest.raises(UsageError, match="link is for emulated hosts"):
        node.joined(Plan(hosts=2, workers=2, link="1gbit"), quiet=True)


def test_shared_memory_is_left_out_between_hosts_unless_it_was_asked_for() -> None:
    assert "shared-memory" not in on_several_hosts(DEFAULT, ",".join(DEFAULT))
    with pytest.raises(PlanError, match="shared-memory"):
        on_several_hosts(["ddp", "shared-memory"], "ddp,shared-memory")


def test_marks_of_emulated_hosts_know_their_links(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(hosts=200, workers=200, threads=1)
    monkeypatch.setenv(LINK_VARIABLE, json.dumps(LinkCheck([1e9], [5e8]).as_dict()))
    assert marks_beside(plan) == []
    monkeypatch.setenv(EMULATED_VARIABLE, "1")
    assert [text.partition(":")[0] for text in marks_beside(plan)] == ["stretched", "link"]


def test_weights_are_known_before_a_run_for_models_of_the_table() -> None:
    assert _weights_bytes(Plan(model="vgg11")) == 4 * 9_231_114
    assert _weights_bytes(Plan(model="mine:Net")) < 1e7
