"""All-reduce side by side: Gloo's own, our ring (and the same ring written by hand), direct, shared memory.

    python benchmarks/allreduce.py --workers 2,4 --save

Every turn checks its result. Times are of the slowest rank; algbw is S/t, busbw is S/t x 2(n-1)/n. The ratio is of
Gloo's time to the contender's, round by round: above 1 is faster than Gloo.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
from support import Contender, join_world, ratio, slowest, take_turns, write_result
from torch import Tensor

from syncline.collectives.execute import Executor
from syncline.collectives.patterns import make_schedule
from syncline.collectives.schedule import chunk_bounds
from syncline.comm import Communicator, instrumented
from syncline.comm.shared_memory import Barrier, Segment
from syncline.comm.torch_backend import TorchCommunicator
from syncline.launcher.here import run_ranks
from syncline.spans import EventLog
from syncline.sync.shared_memory import average_pieces, cut_slice
from syncline.units import format_bytes, format_seconds

SIZES = (4_096, 65_536, 1_048_576, 36_924_456, 268_435_456)


def measure(sizes: list[int]) -> dict[int, dict[str, list[float]]]:
    """On one rank: the seconds of every contender at every size."""
    backend = join_world()
    communicator = instrumented(backend, EventLog(keep=False), deadline_s=120)
    results = {}
    for size in sizes:
        contenders = make_contenders(communicator, backend, size // 4)
        rounds = 30 if size < 10**6 else 15 if size < 10**8 else 5
        results[size] = take_turns(contenders, rounds, meet=dist.barrier)
    communicator.close()
    return results


def make_contenders(
    communicator: Communicator, backend: TorchCommunicator, num_elements: int
) -> dict[str, Contender]:
    world_size, rank = communicator.world_size, communicator.rank
    buffer, scratch = torch.empty(num_elements), torch.empty(num_elements)
    ring = Executor(communicator, make_schedule("ring", world_size))
    direct = Executor(communicator, make_schedule("direct", world_size))
    segment = Segment(communicator, 4 * num_elements * world_size)
    row = [segment.tensor(torch.float32, num_elements, 4 * num_elements * rank) for rank in range(world_size)]
    barrier, pieces = Barrier(segment, communicator), cut_slice(row, rank)

    def scheduled(executor: Executor) -> Callable[[], None]:
        def run() -> None:
            with communicator.scope(f"{executor.schedule.name} {num_elements}"):
                executor.sum(buffer)

        return run

    def shared() -> None:
        barrier.wait("ready")
        average_pieces(pieces, None)
        barrier.wait("done")

    total = sum(range(1, world_size + 1))
    return {
        "gloo": _checked(lambda: dist.all_reduce(buffer), buffer, rank + 1, total),
        "ring by hand": _checked(lambda: ring_by_hand(buffer, scratch, backend.group), buffer, rank + 1, total),
        "ring": _checked(scheduled(ring), buffer, rank + 1, total),
        "direct": _checked(scheduled(direct), buffer, rank + 1, total),
        "shared-memory": _checked(shared, row[rank], rank + 1, total),
    }


def _checked(run: Callable[[], object], buffer: Tensor, value: float, expected: float) -> Contender:
    def check() -> None:
        if not bool((buffer == expected).all()):
            raise AssertionError(f"wrong result: {buffer[:4].tolist()} …, expected {expected}")

    return Contender(run, prepare=lambda: buffer.fill_(value), check=check)


def ring_by_hand(buffer: Tensor, scratch: Tensor, group: dist.ProcessGroup) -> None:
    """The ring as people write it, without schedules: what the executor is held against."""
    rank, world_size = group.rank(), group.size()
    chunks = [buffer[start:stop] for start, stop in chunk_bounds(buffer.numel(), world_size)]
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    for step in range(2 * (world_size - 1)):
        adding = step < world_size - 1
        outgoing = chunks[(rank - step) % world_size]
        target = chunks[(rank - step - 1) % world_size]
        incoming = scratch[: target.numel()] if adding else target
        receive = dist.irecv(incoming, left, group)
        send = dist.isend(outgoing, right, group)
        assert receive is not None
        assert send is not None
        receive.wait()
        if adding:
            target.add_(incoming)
        send.wait()


def table(world_size: int, results: dict[int, dict[str, list[float]]]) -> list[str]:
    lines = [
        f"## {world_size} ranks",
        "",
        "| size | what | median | algbw GB/s | busbw GB/s | gloo / this (quartiles) |",
        "|---|---|---|---|---|---|",
    ]
    for size, contenders in results.items():
        for name, times in contenders.items():
            median = statistics.median(times)
            algbw = size / median / 1e9
            middle, lower, upper = ratio(contenders["gloo"], times)
            busbw = algbw * 2 * (world_size - 1) / world_size
            lines.append(
                f"| {format_bytes(size)} | {name} | {format_seconds(median)} | {algbw:.2f} | {busbw:.2f} "
                f"| {middle:.2f} ({lower:.2f}-{upper:.2f}) |"
            )
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", default="2,4")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="bytes, separated by commas")
    parser.add_argument("--save", action="store_true", help="save the result next to this script")
    chosen = parser.parse_args()
    sizes = [int(size) for size in chosen.sizes.split(",")]
    lines = []
    for world_size in map(int, chosen.workers.split(",")):
        by_rank = run_ranks(measure, (sizes,), workers=world_size, log_dir=None)
        lines += table(world_size, {size: slowest([seconds[size] for seconds in by_rank]) for size in sizes})
    write_result("allreduce", lines, save=chosen.save)


if __name__ == "__main__":
    main()
