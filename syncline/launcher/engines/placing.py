"""Which process becomes which rank: those of one host follow each other, in the order of their numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from syncline.launcher.adopt import Placement


@dataclass(frozen=True)
class Seat:
    """A process that waits for its rank. `host` is its machine, for the engine; `name` is that for people."""

    number: int
    host: str
    name: str
    address: str
    port: int
    """Where its store would listen, if it becomes rank 0."""


def placements(seats: list[Seat], *, run_id: str, restart: int, launcher: str) -> Mapping[int, Placement]:
    """By number of the process. The host of process 0 comes first, the others in the order of their first process.
    Ranks meet at rank 0's own address: the machine of the launcher may be another one."""
    ordered = sorted(seats, key=lambda seat: seat.number)
    hosts = list(dict.fromkeys(seat.host for seat in ordered))
    count = Counter(seat.host for seat in ordered)
    by_rank = sorted(ordered, key=lambda seat: (hosts.index(seat.host), seat.number))
    names = host_names(by_rank)
    placed: dict[int, Placement] = {}
    taken: Counter[str] = Counter()
    for rank, seat in enumerate(by_rank):
        placed[seat.number] = Placement(
            rank=rank,
            world_size=len(by_rank),
            local_rank=taken[seat.host],
            local_world_size=count[seat.host],
            host_index=hosts.index(seat.host),
            num_hosts=len(hosts),
            master_addr=by_rank[0].address,
            master_port=by_rank[0].port,
            launcher=launcher,
            run_id=run_id,
            restart=restart,
            host_names=names,
        )
        taken[seat.host] += 1
    return placed


def host_names(seats: list[Seat]) -> tuple[str, ...]:
    """For people, in the order of hosts. Machines of one name get the start of what tells them apart."""
    named = {seat.host: seat.name for seat in seats}
    often = Counter(named.values())
    return tuple(name if often[name] == 1 else f"{name}/{host[:8]}" for host, name in named.items())
