"""The ranks' side of an elastic run: to ask for another world, and to hear of it.

Keys on the launcher's store, for each world from 0:
  asks/N/SLOT   a process of world N wants the next one; its value is how many commits it has made
  hosts/N       the launcher wants another number of ranks than world N has
  world/N       who has which rank in world N, and the port of its store
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from syncline.launcher.adopt import Placement, elastic_from_environment
from syncline.launcher.starting import LOOPBACK

if TYPE_CHECKING:
    from torch.distributed import TCPStore

_LOOK_SECONDS = 0.05
_STORE_TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True)
class World:
    number: int
    ranks: dict[int, int]
    """By slot."""
    port: int

    def placement(self, slot: int, run_id: str) -> Placement:
        rank, size = self.ranks[slot], len(self.ranks)
        return Placement(
            rank=rank, world_size=size, local_rank=rank, local_world_size=size, host_index=0, num_hosts=1,
            master_addr=LOOPBACK, master_port=self.port, launcher="syncline", run_id=run_id, restart=self.number,
        )  # fmt: skip

    def as_text(self) -> str:
        return json.dumps({"number": self.number, "ranks": list(self.ranks.items()), "port": self.port})


def world_from(text: bytes) -> World:
    read = json.loads(text)
    return World(read["number"], dict(read["ranks"]), read["port"])


def asks_key(world: int, slot: int) -> str:
    return f"asks/{world}/{slot}"


def hosts_key(world: int) -> str:
    return f"hosts/{world}"


def world_key(world: int) -> str:
    return f"world/{world}"


class Worlds:
    """What the launcher of an elastic run tells one of its processes."""

    def __init__(self, store: TCPStore, slot: int, place: Placement) -> None:
        self._store = store
        self._slot = slot
        self.place = place

    def wants_others(self) -> bool:
        """Whether the launcher wants another number of ranks. Talks to the launcher alone."""
        return bool(self._store.check([hosts_key(self.place.restart)]))

    def next(self, commits: int) -> Placement | None:
        """Wait until all others have left this world, too; None if there is no rank for this process in the next."""
        self._store.set(asks_key(self.place.restart, self._slot), str(commits))
        key = world_key(self.place.restart + 1)
        while not self._store.check([key]):
            time.sleep(_LOOK_SECONDS)
        world = world_from(self._store.get(key))
        if self._slot not in world.ranks:
            return None
        self.place = world.placement(self._slot, self.place.run_id)
        return self.place


def worlds() -> Worlds | None:
    """None if the launcher of this process cannot replace ranks."""
    found = elastic_from_environment()
    if found is None:
        return None
    from torch.distributed import TCPStore

    port, slot, place = found
    return Worlds(TCPStore(LOOPBACK, port, is_master=False, timeout=_STORE_TIMEOUT), slot, place)
