"""Memory that the ranks of one host share, and a barrier in it.

The memory has no name (memfd) and goes from rank to rank as a file descriptor, so nothing can be left behind, and the
size of a container's shared-memory mount does not matter. It is allocated at once: too little is an error now, not in
the middle of training.

The socket over which it goes has a name that everybody on the machine can see. So a descriptor goes only to a process
of the same user that proves a secret, which went over the group.
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
from syncline.errors import CommunicationError, PeerLostError, PlanError
from syncline.launcher.trust import is_proof, is_same_user, proof
from syncline.machine import STRONG_MEMORY_ORDER, boot_id

TOKEN_BYTES = 16
LINE = 64
"""Bytes between two ranks' flags: a cache line each, so that ranks do not slow each other down."""
SPINS = 200
YIELDS = 200
LONGEST_SLEEP_S = 0.0002
LOOK_EVERY_S = 0.2
ANSWER_S = 2.0
"""How long rank 0 waits for one that has connected; a rank that was slower connects again."""


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
    return len(ranks_that_share(communicator))


def ranks_that_share(communicator: Communicator) -> list[list[int]]:
    """The ranks of each host, as far as shared memory is concerned. Collective."""
    hosts: dict[tuple[int, ...], list[int]] = {}
    for rank, identity in enumerate(_identities(communicator)):
        hosts.setdefault(tuple(identity), []).append(rank)
    return list(hosts.values())


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
        words = np.frombuffer(self.memory, dtype=np.int64, count=header // 8).reshape(self.world_size, LINE // 8)
        self.flags, self.left = words[:, 0], words[:, 1]
        self.start = header

    def tensor(self, dtype: torch.dtype, count: int, offset: int) -> torch.Tensor:
        return torch.frombuffer(self.memory, dtype=dtype, count=count, offset=self.start + offset)

    def _share(self, communicator: Communicator, size: int) -> int:
        words = torch.frombuffer(bytearray(secrets.token_bytes(2 * TOKEN_BYTES)), dtype=torch.uint8).clone()
        words = words.to(communicator.device)
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
                server = stack.enter_context(_listen(_address(words)))
            communicator.broadcast(words, label="token")
            secret = _hex(words[TOKEN_BYTES:])
            if server is None:
                return _fetch(_address(words), secret, communicator)
            try:
                _hand_out(server, descriptor, secret, communicator)
            except BaseException:
                os.close(descriptor)
                raise
        return descriptor


def _allocate(size: int) -> int:
    descriptor = os.memfd_create("syncline")
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _address(words: torch.Tensor) -> str:
    """An abstract address: no file, and visible only inside one network namespace."""
    return f"\0syncline-{_hex(words[:TOKEN_BYTES])}"


def _hex(words: torch.Tensor) -> str:
    return bytes(words.cpu().tolist()).hex()


def _listen(address: str) -> socket.socket:
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.bind(address)
    server.listen(128)
    return server


def _hand_out(server: socket.socket, descriptor: int, secret: str, communicator: Communicator) -> None:
    """Rank 0's side, until all others have it. Who proves nothing gets nothing, and is not counted."""
    missing = set(range(1, communicator.world_size))
    end = time.monotonic() + communicator.deadline_s
    while missing:
        server.settimeout(max(0.001, end - time.monotonic()))
        try:
            connection, _ = server.accept()
        except TimeoutError:
            raise communicator.overdue("handing out the shared memory", sorted(missing)) from None
        with connection, contextlib.suppress(OSError, ValueError):
            connection.settimeout(ANSWER_S)
            rank = _proven(connection, secret)
            if rank in missing:
                socket.send_fds(connection, [b"m"], [descriptor])
                missing.discard(rank)


def _proven(connection: socket.socket, secret: str) -> int | None:
    """The rank at the other end, if it proves to be one."""
    if not is_same_user(connection):
        return None
    challenge = secrets.token_hex(TOKEN_BYTES)
    connection.sendall(challenge.encode())
    rank, _, answer = connection.recv(200).decode().partition(" ")
    return int(rank) if is_proof(answer, secret, rank, challenge) else None


def _fetch(address: str, secret: str, communicator: Communicator) -> int:
    """A rank's side. A connection that is refused or breaks is tried again: rank 0 may be crowded or slow."""
    end = time.monotonic() + communicator.deadline_s
    while True:
        try:
            return _fetch_once(address, secret, communicator.rank, max(0.001, end - time.monotonic()))
        except OSError as error:
            if time.monotonic() > end:
                raise CommunicationError(
                    f"the shared memory of rank {communicator.ranks[0]} could not be fetched within "
                    f"{communicator.deadline_s:g} s: {error.strerror or error}.",
                    action="Use method bucketed, or raise deadline_s.",
                    rank=communicator.ranks[communicator.rank],
                ) from error
        time.sleep(0.02)


def _fetch_once(address: str, secret: str, rank: int, patience_s: float) -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.settimeout(patience_s)
        client.connect(address)
        if not is_same_user(client):
            raise PermissionError("another user holds its address")
        challenge = client.recv(200).decode(errors="replace")
        client.sendall(f"{rank} {proof(secret, rank, challenge)}".encode())
        _, descriptors, _, _ = socket.recv_fds(client, 1, 1)
        if not descriptors:
            raise ConnectionRefusedError("rank 0 did not accept this rank's proof")
    return descriptors[0]


class Barrier:
    """All ranks wait until all have come, by counters in the segment. Memory written before is seen after."""

    def __init__(self, segment: Segment, communicator: Communicator) -> None:
        self._flags, self._left = segment.flags, segment.left
        self._rank = segment.rank
        self._communicator = communicator
        self._count = 0
        self._processes = _open_peers(communicator)

    def wait(self, what: str) -> None:
        self._count += 1
        self._flags[self._rank] = self._count
        if not self._come_at_once():
            self._sleep_until_all_here(what)
        self._communicator.wait_ended(what)

    def _come_at_once(self) -> bool:
        for _ in range(SPINS):
            if self._all_here():
                return True
        for _ in range(YIELDS):
            os.sched_yield()
            if self._all_here():
                return True
        return False

    def leave(self) -> None:
        """Whoever still waits for this rank waits in vain, and is told."""
        self._left[self._rank] = 1

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
                if looked == begin:
                    self._communicator.wait_began(what)
                looked = now
                self._look_for_the_missing(what, now - begin)

    def _look_for_the_missing(self, what: str, waited_s: float) -> None:
        missing = [rank for rank, count in enumerate(self._flags.tolist()) if count < self._count]
        for rank in missing:
            how = "ended" if self._has_ended(rank) else "left" if self._left[rank] else ""
            if how:
                ranks = self._communicator.ranks
                error = PeerLostError(f"rank {ranks[rank]} {how} during {what}.", rank=ranks[self._rank])
                raise self._communicator.lost(what, error)
        if missing and waited_s > self._communicator.deadline_s:
            raise self._communicator.overdue(what, missing)


def _open_peers(communicator: Communicator) -> dict[int, int]:
    """A descriptor of each other rank's process, which tells when it ends. Collective."""
    with communicator.scope("processes"):
        own = torch.tensor([os.getpid()], device=communicator.device)
        pids = [int(pid) for pid in communicator.all_gather(own, label="process ids")]
    return {rank: os.pidfd_open(pid) for rank, pid in enumerate(pids) if pid != os.getpid()}
