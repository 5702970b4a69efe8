"""What the log says of operations and of packing, for real methods: labels agree over ranks, ends are true."""

from __future__ import annotations

import time
from typing import Any

import torch
from helpers import MANY_WORKERS, on_processes, small_mlp
from torch import nn

from syncline.comm import Communicator
from syncline.comm.communicator import Operation
from syncline.spans import EventLog, Record
from syncline.sync import make_sync

AT_MOST_S = 20.0


def end_of_an_operation_that_is_waited_for_later(comm: Communicator, log: EventLog) -> bool:
    """Whether the end is stamped without a wait, and the stamp is what goes into the log."""
    tensor = torch.ones(1000)
    work: Any = comm.start(Operation("all_reduce", tensor, label="later", waited_later=True))
    traced, give_up = work.work, time.monotonic() + AT_MOST_S
    while traced.end_ns is None and time.monotonic() < give_up:
        time.sleep(0.001)
    before_wait = time.monotonic_ns()
    work.wait()
    record = log.records[-1]
    return bool(record["start"] <= record["end"] <= before_wait and tensor[0] == comm.world_size)


def test_overlapped_operation_ends_when_it_ends_and_not_when_it_is_waited_for() -> None:
    assert on_processes(2, end_of_an_operation_that_is_waited_for_later) == [True, True]


def one_step_of_every_method(comm: Communicator, log: EventLog) -> dict[str, list[Record]]:
    found = {}
    for method in MANY_WORKERS:
        torch.manual_seed(comm.rank)
        model: nn.Module = small_mlp()
        log.method = method
        sync = make_sync(method, comm, log=log)
        module = sync.attach(model)
        for log.step in range(2):
            before = len(log.records)
            module(torch.randn(2, 3, 6, 6)).sum().backward()
            sync.finish()
        found[method] = [one for one in log.records[before:] if one["kind"] in ("collective", "pack")]
    return found


def test_every_methods_records_have_all_stamps_and_the_same_labels_on_all_ranks() -> None:
    """Three ranks: no power of two, so that every method divides after the sum."""
    by_rank = on_processes(3, one_step_of_every_method)
    for method in MANY_WORKERS:
        labels = []
        for found in by_rank:
            transfers = [one for one in found[method] if one["kind"] == "collective"]
            assert transfers, method
            for one in transfers:
                assert one["ready"] <= one["end"], method
                assert one["start"] <= one["end"], method
                assert one["bytes"] > 0, method
                assert one["label"], method
            labels.append(sorted({one["label"] for one in transfers}))
        assert labels == [labels[0]] * 3, method
        packs = [one for found in by_rank for one in found[method] if one["kind"] == "pack"]
        assert packs, method
        assert all(0 <= one["busy"] <= one["end"] - one["start"] for one in packs), method
