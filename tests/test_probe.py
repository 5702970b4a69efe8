"""The probe on ranks that are threads: what it measures, in which shape, and that a wrong value stops it."""

from __future__ import annotations

import pytest
from helpers import on_threads

from syncline.accounting.bandwidth import bus_factor, link_rate
from syncline.comm.communicator import Communicator, Operation, Work, Wrapper
from syncline.errors import CommunicationError, PlanError
from syncline.measure.probing import run_probe, summarise
from syncline.spans import EventLog

SIZES = [4, 4000, 100_000]


class Quiet:
    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def progress(self, done: int, total: int, figures: str) -> None:
        self.seen.append((done, total))


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_operation_is_timed_checked_and_fitted(world_size: int) -> None:
    progress = [Quiet() for _ in range(world_size)]

    def live(communicator: Communicator, _: EventLog) -> list[dict[str, object]]:
        observer = progress[communicator.rank]
        return run_probe(communicator.backend, ["threads", "shared-memory"], SIZES, 2, observer)

    by_rank = on_threads(world_size, live)
    assert all(rows == by_rank[0] for rows in by_rank), "all ranks return the slowest rank's times"
    rows = {(row["backend"], row["operation"]): row for row in by_rank[0]}
    operations = ["all_reduce", "send_receive", "broadcast", "gather", "scatter"]
    assert list(rows) == [*(("threads", one) for one in operations), ("shared-memory", "all_reduce")]
    for row in rows.values():
        assert [(point["bytes"], point["repeats"]) for point in row["points"]] == [(4, 40), (4000, 40), (100_000, 20)]
        for point in row["points"]:
            factor = bus_factor(str(row["operation"]), world_size)
            assert point["bytes_per_s"] == pytest.approx(point["bytes"] / point["median_s"])
            assert point["bus_bytes_per_s"] == pytest.approx(point["bytes_per_s"] * factor)
        assert row["fit"]["beta_s_per_byte"] >= 0
    assert [done for done, _ in progress[0].seen] == list(range(progress[0].seen[0][1]))
    summary = summarise(by_rank[0], workers=world_size)
    assert link_rate(summary, "threads") == rows["threads", "send_receive"]["fit"]["bytes_per_s"]
    assert link_rate(summary, "shared-memory") is None


class Spoiling(Wrapper):
    """Changes one value of one operation's result on one rank."""

    def __init__(self, inner: Communicator, operation: str) -> None:
        super().__init__(inner)
        self.spoiled = operation

    def split(self, name: str) -> Communicator:
        return self.inner.split(name)

    def start(self, operation: Operation) -> Work:
        work = self.inner.start(operation)
        result = operation.parts[-1] if operation.name == "gather" and operation.parts else operation.tensor
        if operation.name != self.spoiled or result.numel() < 1000:
            return work

        class Spoiled:
            def wait(self) -> None:
                work.wait()
                result[777] += 1

        return Spoiled()


@pytest.mark.parametrize(
    ("operation", "rank"), [("all_reduce", 1), ("receive", 1), ("broadcast", 1), ("gather", 0), ("scatter", 1)]
)
def test_one_wrong_value_on_one_rank_stops_the_probe(operation: str, rank: int) -> None:
    def live(communicator: Communicator, _: EventLog) -> None:
        backend = communicator.backend
        run_probe(Spoiling(backend, operation) if backend.rank == rank else backend, ["threads"], SIZES, 1, Quiet())

    name = "send_receive" if operation == "receive" else operation
    with pytest.raises(CommunicationError, match=rf"\[rank {rank}\] {name} of .* over threads gave wrong values"):
        on_threads(2, live)


def test_one_rank_has_nobody_to_talk_to() -> None:
    with pytest.raises(PlanError, match="at least 2 workers"):
        on_threads(1, lambda communicator, _: run_probe(communicator, ["threads"], SIZES, 1, Quiet()))
