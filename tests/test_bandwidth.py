"""Bytes and bandwidth: theory against the kernel's count over Gloo, rules on logs made by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import on_processes

from syncline.accounting.bandwidth import Bandwidth, Wire, bandwidth, find_link, transfer_seconds, wire_of
from syncline.accounting.usage import memory
from syncline.blocks import body_of, group_records
from syncline.collectives.execute import Executor
from syncline.collectives.patterns import PATTERNS, make_schedule
from syncline.comm.communicator import Communicator
from syncline.comm.counters import TrafficCounter
from syncline.events import Events, Phase, RankInfo, RankStep, Step, Steps, Transfer
from syncline.events.rank_log import RankLog
from syncline.plan import Plan, parse_plan
from syncline.spans import EventLog
from syncline.store import Run, create_run

MEGABYTE = 1_000_000


@pytest.mark.parametrize(
    ("name", "label", "by_rank"),
    [
        ("all_reduce", "", [(1.5, 1.5)] * 4),
        ("all_gather", "", [(3, 3)] * 4),
        ("broadcast", "", [(2, 0), (1, 1), (0, 1), (0, 1)]),
        ("gather", "", [(0, 3), (1, 0), (1, 0), (1, 0)]),
        ("scatter", "", [(3, 0), (0, 1), (0, 1), (0, 1)]),
        ("send", "", [(1, 0)] * 4),
        ("receive", "", [(0, 1)] * 4),
        ("schedule", "root bucket 0", [(3, 3), (1, 1), (1, 1), (1, 1)]),
        ("schedule", "tree bucket 0", [(2, 2), (2, 2), (1, 1), (1, 1)]),
        ("schedule", "ring bucket 0", [(1.5, 1.5)] * 4),
        ("schedule", "halving-doubling bucket 0", [(1.5, 1.5)] * 4),
        ("schedule", "direct bucket 0", [(1.5, 1.5)] * 4),
        ("shared_memory", "all gradients", [(0, 0)] * 4),
    ],
)
def test_theory_of_each_operation_on_four_ranks(name: str, label: str, by_rank: list[tuple[float, float]]) -> None:
    for rank, (sent, received) in enumerate(by_rank):
        wire = wire_of(name, label, MEGABYTE, rank=rank, world_size=4)
        assert wire == Wire(sent * MEGABYTE, received * MEGABYTE), rank


def test_a_16_bit_wire_halves_a_schedule_and_the_unknown_has_no_theory() -> None:
    half = wire_of("schedule", "ring b", MEGABYTE, rank=1, world_size=4, wire_bytes=2)
    assert half == Wire(0.75 * MEGABYTE, 0.75 * MEGABYTE)
    assert wire_of("schedule", "spiral b", MEGABYTE, rank=0, world_size=4) is None
    assert wire_of("all_to_all", "", MEGABYTE, rank=0, world_size=4) is None


def _count_everything(communicator: Communicator, _: EventLog) -> dict[str, tuple[int, int]]:
    backend, rank, world_size = communicator.backend, communicator.rank, communicator.world_size
    values = torch.ones(MEGABYTE // 4)
    parts = [torch.ones_like(values) for _ in range(world_size)] if rank == 0 else None
    executors = {name: Executor(backend, make_schedule(name, world_size)) for name in PATTERNS}
    narrow = Executor(backend, make_schedule("direct", world_size), torch.bfloat16)
    operations: dict[str, Any] = {
        "all_reduce": lambda: backend.all_reduce(values),
        "all_gather": lambda: backend.all_gather(values),
        "broadcast": lambda: backend.broadcast(values),
        "gather": lambda: backend.gather(values, parts),
        "scatter": lambda: backend.scatter(values, parts),
        **{name: lambda one=one: one.sum(values) for name, one in executors.items()},
        "narrow": lambda: narrow.sum(values),
    }
    counter, counted = TrafficCounter(), {}
    for name, run in operations.items():
        backend.all_reduce(torch.zeros(1))
        before = counter.read()
        run()
        moved = counter.read() - before
        counted[name] = (moved["sent"], moved["received"])
    backend.all_reduce(torch.zeros(1))  # a rank that leaves closes its connections, and they are counted no more
    return counted


def test_the_kernel_counts_what_theory_says_for_every_operation_over_gloo() -> None:
    for rank, counted in enumerate(on_processes(3, _count_everything)):
        for name, found in counted.items():
            pattern = "direct" if name == "narrow" else name
            is_ours, size = pattern in PATTERNS, 2 if name == "narrow" else 4
            operation, label = ("schedule", f"{pattern} b") if is_ours else (name, "")
            wire = wire_of(operation, label, MEGABYTE, rank=rank, world_size=3, wire_bytes=size)
            assert wire is not None
            assert found == pytest.approx((wire.sent, wire.received), rel=0.002, abs=3000), (rank, name)


def logged(world_size: int = 3, *, hosts: int = 1, counted: float = 4 / 3 * MEGABYTE) -> Events:
    """Three steps with one all-reduce of 1 MB: ready at 1 ms on rank 0 and at 2 ms on the last, ended at 6 ms."""
    steps, records = [], {}
    for number in range(3):
        ranks = {}
        for rank in range(world_size):
            ready = 2_000_000 if rank == world_size - 1 else 1_000_000
            transfer = Transfer("all_reduce", "bucket 0", MEGABYTE, ready, ready, 6_000_000 - 1000 * rank)
            ranks[rank] = RankStep(rank, 0, 7_000_000, (Phase("forward", 0, 1000),), (transfer,))
            record = {"kind": "counter", "step": number, "method": "bucketed", "sent": counted, "received": counted}
            record |= {"interface_sent": 10, "interface_received": 20}
            records.setdefault(rank, []).append(record)
        steps.append(Step(number, 0, ranks))
    infos = {rank: RankInfo(rank, host=rank % hosts) for rank in range(world_size)}
    return Events(world_size, infos, {"bucketed": Steps.of(steps)}, {}, logs_of(records), [])


def logs_of(records: dict[int, list[dict[str, Any]]]) -> dict[int, list[RankLog]]:
    logs = {rank: [RankLog(rank, {})] for rank in records}
    for rank, own in records.items():
        logs[rank][0].look(body_of(own), group_records(own))
    return logs


def measured(events: Events, **given: Any) -> Bandwidth:
    plan = parse_plan({"method": "bucketed", "workers": 3})
    found = bandwidth(events, "bucketed", plan, events.complete("bucketed"), **given)
    assert found is not None
    return found


def test_bandwidth_from_ready_on_all_ranks_to_the_last_end() -> None:
    found = measured(logged(), link=(1e9, "probe"))
    (bucket,) = found.buckets
    assert bucket.seconds == pytest.approx(0.004)
    assert bucket.algorithm_bytes_per_s == pytest.approx(250e6)
    assert bucket.bus_bytes_per_s == pytest.approx(250e6 * 4 / 3)
    assert bucket.utilisation == pytest.approx(1 / 3)
    assert found.note == ""
    assert all(rank.agrees and rank.interface is None for rank in found.ranks)
    assert measured(logged()).buckets[0].utilisation is None
    assert "syncline probe" in measured(logged()).link_source


def test_the_interface_counts_where_hosts_have_one_each() -> None:
    assert measured(logged(hosts=3)).ranks[1].interface == Wire(10, 20)


def test_a_wrong_theory_shows() -> None:
    def through_the_root(name: str, label: str, num_bytes: int, **where: Any) -> Wire | None:
        return wire_of("schedule", "root b", num_bytes, **where)

    found = measured(logged(), theory=through_the_root)
    assert [rank.agrees for rank in found.ranks] == [False] * 3
    assert "rank 0 should send 2000000 and receive 2000000 bytes" in found.note
    assert "sent 1333333" in found.note


@pytest.mark.parametrize(("factor", "agrees"), [(1.0, True), (1.01, True), (1.05, False), (0.9, False), (0.0, False)])
def test_how_far_a_count_may_be_off(factor: float, agrees: bool) -> None:
    assert measured(logged(counted=4 / 3 * MEGABYTE * factor)).ranks[0].agrees is agrees


def test_without_counters_or_theory_there_is_nothing_to_compare() -> None:
    events = replace(logged(), logs={})
    assert measured(events).ranks[0].counted is None
    assert measured(events).ranks[0].agrees is None
    assert measured(logged(), theory=lambda *_, **__: None).ranks[0].agrees is None
    assert bandwidth(events, "ddp", Plan(), []) is None


def test_sockets_say_nothing_about_mpi() -> None:
    events = logged(counted=0)
    of_mpi = replace(
        events,
        steps={"mpi": events.steps["bucketed"]},
        logs=logs_of({rank: [{**one, "method": "mpi"}] for rank, one in events.of_kind("counter")}),
    )
    found = bandwidth(of_mpi, "mpi", parse_plan({"method": "mpi", "workers": 3}), of_mpi.complete("mpi"))
    assert found is not None
    assert found.note == ""
    assert found.ranks[0].counted is None
    assert measured(events).note != ""


def test_only_the_leaders_of_hosts_share_what_they_send() -> None:
    """As method hierarchical logs it: ranks 0 and 2 send, rank 1 copies on its host."""
    events = logged(counted=MEGABYTE)
    for step in events.steps["bucketed"]:
        (sent,) = step.ranks[1].transfers
        step.ranks[1] = replace(step.ranks[1], transfers=(replace(sent, name="shared_memory"),))
    copied = [{**record, "sent": 0, "received": 0} for rank, record in events.of_kind("counter") if rank == 1]
    found = measured(replace(events, logs={**events.logs, **logs_of({1: copied})}))
    assert [rank.theory for rank in found.ranks] == [Wire(MEGABYTE, MEGABYTE), Wire(0, 0), Wire(MEGABYTE, MEGABYTE)]
    assert all(rank.agrees for rank in found.ranks)
    by_name = {bucket.name: bucket for bucket in found.buckets}
    assert by_name["all_reduce"].bus_bytes_per_s == by_name["all_reduce"].algorithm_bytes_per_s
    assert by_name["shared_memory"].bus_bytes_per_s is None


def test_an_operation_that_ended_before_the_last_was_ready_takes_no_negative_time() -> None:
    early, late = Transfer("send", "a", 8, 0, 0, 5), Transfer("receive", "a", 8, 9, 9, 10)
    step = Step(0, 0, {0: RankStep(0, 0, 10, transfers=(early,)), 1: RankStep(1, 0, 10, transfers=(late,))})
    assert transfer_seconds(step) == {("send", "a", 8): 5e-9, ("receive", "a", 8): 1e-9}


def test_the_newest_fitting_probe_gives_the_link(tmp_path: Path) -> None:
    def probed(name: str, rate: float, *, status: str = "finished", **about: Any) -> None:
        run = create_run(tmp_path / name, kind="probe", plan=plan, label="x")
        links = {"gloo": {"bytes_per_s": rate}}
        summary = {"workers": 2, "hosts": 1, "link": None, "rows": [], "links": links, **about}
        run.write_summary(summary)
        run.set_status(status)

    plan = parse_plan({"workers": 2})
    run = Run(create_run(tmp_path / "run", kind="train", plan=plan, label="x").path)
    assert find_link(run) is None
    probed("a", 1e9)
    probed("b", 2e9)
    probed("other-world", 3e9, workers=4)
    probed("other-link", 4e9, hosts=2, link="1gbit")
    probed("failed", 5e9, status="failed")
    probed("no-rate", 6e9, links={})
    probed("damaged", 7e9, rows="what")
    assert find_link(run) == (2e9, str(tmp_path / "b"))


def test_memory_is_the_last_record_of_each_rank() -> None:
    one = {"kind": "memory", "method": "ddp", "peak_resident_bytes": 1, "parameter_bytes": 2, "gradient_bytes": 3}
    one |= {"buffer_bytes": 4, "gradients_in_buffers": True}
    later = {**one, "peak_resident_bytes": 9}
    events = replace(logged(), logs=logs_of({1: [one, later], 0: [{**one, "buffer_bytes": None}]}))
    (found,) = memory(events, "ddp")
    assert (found.rank, found.peak_resident_bytes, found.gradients_in_buffers) == (1, 9, True)
    assert memory(events, "bucketed") == []
