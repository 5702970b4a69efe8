"""Memory that the ranks of one host share, and a barrier in it.

The memory has no name (memfd) and goes from rank to rank as a file descriptor, so nothing can be left behind, and the
size of a container's shared-memory mount does not matter. It is allocated at once: too little is an error now, not in
the middle of training.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import secrets
import select
import socket
import time
from pathlib import Path

import numpy as np
import torch

from syncline.comm.communicator import Communicator
from syncline.errors import CommunicationError, DeadlineError, PeerLostError, PlanError
from syncline.machine import STRONG_MEMORY_ORDER, boot_id

TOKEN_BYTES = 16
LINE = 64
"""Bytes between two ranks' flags: a cache line each, so that ranks do not slow each other down."""
SPINS = 200
YIELDS = 200
LONGEST_SLEEP_S = 0.0002
LOOK_EVERY_S = 0.2


def check_one_host(communicator: Communicator) -> None:
    """Refuse ranks that launch did not put on one host, or that cannot see each other's memory. Collective."""
    _check_memory_order()
    identities = _identities(communicator)
    for rank, identity in enumerate(identities):
        if identity != identities[0]:
            raise PlanError(
                f"ranks 0 and {rank} are not on one host, so they cannot share memory.",
                action="Use method bucketed.",
                rank=communicator.rank,
            )


def _check_memory_order() -> None:
    if platform.machine() not in STRONG_MEMORY_ORDER:
        raise PlanError(
            f"shared memory relies on the memory order of x86; this is {platform.machine()}.",
            action="Use method bucketed.",
        )


def ranks_by_host(communicator: Communicator) -> list[list[int]]:
    """The ranks of each host, as launch says; refused if those of one host cannot share memory. Collective."""
    hosts: dict[int, list[int]] = {}
    identities = _identities(communicator)
    for rank, identity in enumerate(identities):
        hosts.setdefault(identity[0], []).append(rank)
    for host, ranks in hosts.items():
        apart = [rank for rank in ranks if identities[rank] != identities[ranks[0]]]
        if apart:
            raise PlanError(
                f"ranks {ranks[0]} and {apart[0]} should be on one host ({host}), but share no memory.",
                action="Use method bucketed.",
                rank=communicator.rank,
            )
    if len(hosts) < len(identities):
        _check_memory_order()
    return [hosts[host] for host in sorted(hosts)]


def count_hosts(communicator: Communicator) -> int:
    """How many hosts the ranks are on, as far as shared memory is concerned. Collective."""
    return len({tuple(identity) for identity in _identities(communicator)})


def _identities(communicator: Communicator) -> list[list[int]]:
    own = torch.tensor(_identity(communicator.host_index), device=communicator.device)
    with communicator.scope("one host"):
        return [identity.tolist() for identity in communicator.all_gather(own, label="host identity")]


def _identity(host_index: int) -> list[int]:
    """What ranks on one host have in common: launch's word, the boot, and the namespaces of network and processes."""
    boot = int(boot_id().replace("-", "")[:15] or "0", 16)
    namespaces = [Path("/proc/self/ns") / kind for kind in ("net", "pid")]
    return [host_index, boot, *(path.stat().st_ino if path.exists() else 0 for path in namespaces)]


class Segment:
    """Zeroed memory shared by all ranks of a communicator, who are on one host. Made collectively."""

    def __init__(self, communicator: Communicator, num_bytes: int) -> None:
        self.rank = communicator.rank
        self.world_size = communicator.world_size
        header = LINE * self.world_size
        descriptor = self._share(communicator, header + num_bytes)
        try:
            self.memory = mmap.mmap(descriptor, header + num_bytes)
        finally:
            os.close(descriptor)
        flags = np.frombuffer(self.memory, dtype=np.int64, count=header // 8)
        self.flags = flags.reshape(self.world_size, LINE // 8)[:, 0]
        self.start = header

    def tensor(self, dtype: torch.dtype, count: int, offset: int) -> torch.Tensor:
        return torch.frombuffer(self.memory, dtype=dtype, count=count, offset=self.start + offset)

    def _share(self, communicator: Communicator, size: int) -> int:
        token = torch.frombuffer(bytearray(secrets.token_bytes(TOKEN_BYTES)), dtype=torch.uint8).clone()
        token = token.to(communicator.device)
        problem = torch.zeros(1, dtype=torch.int64, device=communicator.device)
        descriptor, server = -1, None
        if self.rank == 0:
            try:
                descriptor = _allocate(size)
            except OSError as error:
                problem[0] = error.errno or 1
        with communicator.scope("shared memory"), contextlib.ExitStack() as stack:
            communicator.broadcast(problem, label="allocation")
            if problem.item():
                raise CommunicationError(
                    f"cannot allocate {size / 1e6:.0f} MB of shared memory: {os.strerror(int(problem.item()))}.",
                    action="Free memory, or use fewer workers or method bucketed.",
                    rank=self.rank,
                )
            if self.rank == 0:
                server = stack.enter_context(_listen(token))
            communicator.broadcast(token, label="token")
            if server is None:
                return _receive_descriptor(token)
            _hand_out(server, descriptor, self.world_size - 1)
        return descriptor


def _allocate(size: int) -> int:
    descriptor = os.memfd_create("syncline")
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _address(token: torch.Tensor) -> str:
    """An abstract address: no file, and visible only inside one network namespace."""
    return f"\0syncline-{bytes(token.cpu().tolist()).hex()}"


def _listen(token: torch.Tensor) -> socket.socket:
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(_address(token))
    server.listen(128)
    server.settimeout(30)
    return server


def _hand_out(server: socket.socket, descriptor: int, count: int) -> None:
    for _ in range(count):
        connection, _ = server.accept()
        with connection:
            socket.send_fds(connection, [b"m"], [descriptor])


def _receive_descriptor(token: torch.Tensor) -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(30)
        client.connect(_address(token))
        _, descriptors, _, _ = socket.recv_fds(client, 1, 1)
    return descriptors[0]


class Barrier:
    """All ranks wait until all have come, by counters in the segment. Memory written before is seen after."""

    def __init__(self, segment: Segment, communicator: Communicator) -> None:
        self._flags = segment.flags
        self._rank = segment.rank
        self._ranks = communicator.ranks
        self._deadline_s = communicator.deadline_s
        self._count = 0
        self._processes = _open_peers(communicator)

    def wait(self, what: str) -> None:
        self._count += 1
        self._flags[self._rank] = self._count
        for _ in range(SPINS):
            if self._all_here():
                return
        for _ in range(YIELDS):
            os.sched_yield()
            if self._all_here():
                return
        self._sleep_until_all_here(what)

    def close(self) -> None:
        for descriptor in self._processes.values():
            os.close(descriptor)
        self._processes.clear()

    def _has_ended(self, rank: int) -> bool:
        if rank not in self._processes:
            return False
        poll = select.poll()  # select itself knows no descriptor above 1023
        poll.register(self._processes[rank], select.POLLIN)
        return bool(poll.poll(0))

    def _all_here(self) -> bool:
        return bool(self._flags.min() >= self._count)

    def _sleep_until_all_here(self, what: str) -> None:
        """A rank that waits for long leaves its core to the one that it waits for."""
        begin = looked = time.monotonic()
        pause = 20e-6
        while not self._all_here():
            time.sleep(pause)
            pause = min(LONGEST_SLEEP_S, pause * 1.5)
            now = time.monotonic()
            if now - looked > LOOK_EVERY_S:
                looked = now
                self._look_for_the_missing(what, now - begin)

    def _look_for_the_missing(self, what: str, waited_s: float) -> None:
        missing = [rank for rank, count in enumerate(self._flags.tolist()) if count < self._count]
        dead = [rank for rank in missing if self._has_ended(rank)]
        if dead:
            raise PeerLostError(f"rank {self._ranks[dead[0]]} ended during {what}.", rank=self._ranks[self._rank])
        if missing and waited_s > self._deadline_s:
            names = ", ".join(f"rank {self._ranks[rank]}" for rank in missing)
            raise DeadlineError(
                f"{what} did not end within {self._deadline_s:g} s; missing: {names}.",
                action="Look at what the missing ranks were doing, or raise deadline_s.",
                rank=self._ranks[self._rank],
            )


def _open_peers(communicator: Communicator) -> dict[int, int]:
    """A descriptor of each other rank's process, which tells when it ends. Collective."""
    with communicator.scope("processes"):
        own = torch.tensor([os.getpid()], device=communicator.device)
        pids = [int(pid) for pid in communicator.all_gather(own, label="process ids")]
    return {rank: os.pidfd_open(pid) for rank, pid in enumerate(pids) if pid != os.getpid()}
