"""Where ranks run, as flags say it: machines, emulated hosts, this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from syncline import jobs
from syncline.cli.options import Where
from syncline.errors import PlanError, UsageError
from syncline.launcher.nodes import Node
from syncline.launcher.places import EmulatedHosts, Here, Nodes, _weights_bytes, place_for
from syncline.plan import Plan, load_plan
from syncline.voice import Voice


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
    at = where(**flags)
    plan = load_plan(None, {"hosts": at.num_hosts, "workers": at.workers(given.get("workers"))})
    assert (plan.hosts, plan.workers) == expected


def test_both_ways_to_count_workers_are_refused() -> None:
    with pytest.raises(PlanError, match="--workers and --workers-per-host"):
        where(hosts=2, workers_per_host=2).workers(4)


def test_place_follows_from_flags_and_plan() -> None:
    assert where(hosts=2).place(Plan(hosts=2)) == EmulatedHosts(600.0)
    node = Node(2, 1, "a:1", 600.0, folder=Path("runs"))
    assert where(nodes=2, node_rank=1, rendezvous="a:1").place(Plan(hosts=2)) == Nodes(node)
    assert where().place(Plan()) == Here()
    assert place_for(Plan(hosts=3)) == EmulatedHosts()
    assert not Nodes(Node(2, 1, "a:1")).owns_run
    assert Nodes(Node(2, 1, "a:1")).ranks_here(Plan(hosts=2, workers=6)) == 3


def test_link_of_a_plan_is_not_ignored_on_machines() -> None:
    place = Nodes(Node(2, 0, "127.0.0.1:29500"))
    plan = Plan(hosts=2, workers=2, link="1gbit")
    with pytest.raises(UsageError, match="link applies only to emulated hosts"), place.joined(plan, Voice()):
        pass


def test_shared_memory_is_left_out_between_hosts_unless_it_was_asked_for() -> None:
    assert "shared-memory" not in jobs._on_several_hosts(list(jobs.COMPARED), is_default=True)
    with pytest.raises(PlanError, match="shared-memory"):
        jobs._on_several_hosts(["ddp", "shared-memory"], is_default=False)


def test_weights_are_known_before_a_run_for_models_of_the_table() -> None:
    assert _weights_bytes(Plan(model="vgg11")) == 4 * 9_231_114
    assert _weights_bytes(Plan(model="mine:Net")) < 1e7
