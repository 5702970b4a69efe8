"""What users must know before they trust emulated hosts: links that are too slow here, and the memory they need."""

from __future__ import annotations

from pathlib import Path

import pytest

from syncline import machine
from syncline.errors import UsageError
from syncline.launcher.emulation import EmulatedCluster
from syncline.launcher.emulation.link_check import LinkCheck, measure_links
from syncline.machine import available_bytes, check_memory, estimated_bytes


def test_every_link_is_measured_while_all_hosts_send() -> None:
    """The slower of two links counts; no link is faster than it was asked to be."""
    with EmulatedCluster(3, [40e6, 40e6, 10e6]) as cluster:
        before = [cluster.counters(host) for host in range(3)]
        check = measure_links(cluster, seconds=0.5)
        after = [cluster.counters(host) for host in range(3)]
    assert check.asked == [40e6, 10e6, 10e6]
    assert all(0 < measured <= 1.02 * asked for measured, asked in zip(check.measured, check.asked, strict=True))
    sent = [new["sent_bytes"] - old["sent_bytes"] for new, old in zip(after, before, strict=True)]
    assert min(sent) > 100_000, "each host sent"


def test_one_host_has_no_link_to_check() -> None:
    with EmulatedCluster(1, [1e9]) as cluster:
        assert measure_links(cluster) == LinkCheck([1e9], [1e9])


@pytest.mark.parametrize(
    ("measured", "note"),
    [
        ([0.95e9, 0.91e9], ""),
        (
            [0.95e9, 0.3e9],
            "link: host1 reached 300 Mbit/s of 1 Gbit/s when all hosts sent at once: this machine cannot carry more",
        ),
    ],
)
def test_link_below_nine_tenths_of_its_rate_is_said(measured: list[float], note: str) -> None:
    check = LinkCheck([1e9, 1e9], measured)
    assert check.note == note
    assert check.line == (note or "links carried 910 Mbit/s to 950 Mbit/s when all hosts sent at once")


def test_memory_is_estimated_and_too_little_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    needed = [estimated_bytes(hosts=hosts, ranks=hosts, weights_bytes=37e6) for hosts in (1, 2, 8)]
    assert needed[2] - needed[0] == 7 * (needed[1] - needed[0]), "what hosts share counts once"
    assert needed[0] > needed[1] - needed[0] > 5 * 37e6
    monkeypatch.setattr(machine, "available_bytes", lambda: needed[1])
    assert "about" in check_memory(hosts=1, ranks=1, weights_bytes=37e6)
    with pytest.raises(UsageError, match="3 hosts with 3 ranks need about"):
        check_memory(hosts=3, ranks=3, weights_bytes=37e6)
    table = tmp_path / "meminfo"
    table.write_text("MemTotal: 10 kB\nMemAvailable:    4 kB\nBuffers: 1 kB\n")
    group = tmp_path / "group"
    assert available_bytes(table, group) == 4096
    group.mkdir()
    (group / "memory.current").write_text("1000")
    for limit, left in (("max", 4096), ("3000", 2000), ("900", 0)):
        (group / "memory.max").write_text(limit)
        assert available_bytes(table, group) == left
