"""Communicator over torch.distributed: Gloo on CPU, NCCL on GPUs."""

from __future__ import annotations

import gc
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from syncline.comm import devices
from syncline.comm.communicator import Communicator, Operation, Work
from syncline.comm.short_turns import new_threads_take_short_turns
from syncline.errors import CommunicationError, DeadlineError, PeerLostError
from syncline.launcher.adopt import Placement
from syncline.launcher.route import Meeting

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

Result = TypeVar("Result")

_MORE_S = 2.0
"""How long a rank that could not connect waits for others to say the same."""


class TorchCommunicator(Communicator):
    """Over a process group that exists already. `close` destroys it only if it is `owned`."""

    def __init__(
        self, group: dist.ProcessGroup, store: Store, *, owned: bool, deadline: timedelta, host_index: int = 0
    ) -> None:
        self.group = group
        self.store = store
        self.deadline = deadline
        self.deadline_s = deadline.total_seconds()
        self.host_index = host_index
        self.rank = group.rank()
        self.world_size = group.size()
        self._ranks: Sequence[int] = dist.get_process_group_ranks(group)
        self._owned = owned
        self._splits = 0
        gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
        self.device = devices.for_small_messages(dist.get_backend_config(group), gpu)

    def start(self, operation: Operation) -> Work:
        return _TorchWork(lambda: _START[operation.name](operation, self.group), on_gpu=operation.tensor.is_cuda)

    def split(self, name: str) -> TorchCommunicator:
        """A subgroup keeps its one set of channels, because torch can only make new ones with the whole world: there,
        nothing else may talk while buckets are on their way."""
        ranks = dist.get_process_group_ranks(self.group)
        self._splits += 1
        store = dist.PrefixStore(f"{name}#{self._splits}", self.store)
        whole = len(ranks) == dist.get_world_size()
        with new_threads_take_short_turns():
            group = dist.new_group(ranks, self.deadline, dist.get_backend(self.group)) if whole else self.group
        return TorchCommunicator(group, store, owned=whole, deadline=self.deadline, host_index=self.host_index)

    def part(self, name: str, groups: Sequence[Sequence[int]]) -> TorchCommunicator | None:
        """Within the whole world all ranks make all groups, as torch wants it; within a subgroup only members meet.

        Torch names a group of the second kind by its members, and one that was destroyed leaves its addresses behind
        under that name: so such a group is kept, and the next one gets another name.
        """
        self._splits += 1
        ranks = dist.get_process_group_ranks(self.group)
        whole = len(ranks) == dist.get_world_size()
        if not whole:
            # The name also counts the groups that there are. Wrappers that a script has dropped end theirs when they
            # are collected, which is not at the same time on all ranks: they would wait under different names.
            gc.collect()
        made, own = None, None
        for group in groups:
            is_ours = self.rank in group
            if whole or is_ours:
                members = [ranks[member] for member in group]
                with new_threads_take_short_turns():
                    new = dist.new_group(
                        members, self.deadline, dist.get_backend(self.group), use_local_synchronization=not whole
                    )
                made, own = (new, list(group)) if is_ours else (made, own)
        if made is None or own is None:
            return None
        store = dist.PrefixStore(f"{name}#{self._splits}/{own[0]}", self.store)
        return TorchCommunicator(made, store, owned=whole, deadline=self.deadline, host_index=self.host_index)

    @property
    def ranks(self) -> Sequence[int]:
        return self._ranks

    def close(self) -> None:
        if self._owned and dist.is_initialized():
            self._owned = False
            dist.destroy_process_group(self.group)


class _TorchWork:
    """Starts at once; translates torch's errors into ours, at start and at wait."""

    def __init__(self, begin: Callable[[], dist.Work | None], *, on_gpu: bool = False) -> None:
        self._work = _translated(begin)
        self._on_gpu = on_gpu

    def wait(self) -> None:
        work = self._work
        if work is not None:
            _translated(work.wait)

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call back from the thread that ends the operation, as soon as it ends. Not for sends, which have no future,
        nor on a GPU, whose future is done before the GPU is."""
        if self._work is not None and not self._on_gpu:
            self._work.get_future().add_done_callback(lambda _: callback())


def connect(
    place: Placement, *, backend: str, deadline: timedelta, meeting: Meeting | None = None
) -> TorchCommunicator:
    """Join the world that the launcher's environment describes, or that meets elsewhere."""
    return join(open_store(place, deadline, meeting), place, backend=backend, deadline=deadline)


def open_store(place: Placement, deadline: timedelta, meeting: Meeting | None = None) -> Store:
    """What ranks find each other by. Once in a process: rank 0 may serve it."""
    if meeting is not None:
        return _meet(meeting, place.rank, deadline)
    store, _, _ = next(dist.rendezvous("env://", place.rank, place.world_size, timeout=deadline))
    return store  # type: ignore[no-any-return]


def join(store: Store, place: Placement, *, backend: str, deadline: timedelta) -> TorchCommunicator:
    """Become a rank. Whoever joins again must give the store another prefix. Collective."""
    rank, world_size = place.rank, place.world_size
    start = _Start(dist.PrefixStore("start", store), place, deadline.total_seconds())
    start.wait_for_all("here", deadline.total_seconds(), "did not join the others")
    try:
        dist.init_process_group(
            backend, store=dist.PrefixStore("group", store), rank=rank, world_size=world_size, timeout=deadline
        )
    except RuntimeError as error:
        if isinstance(translate(error), DeadlineError):
            # Torch names a key of the store. Those that give up too were waiting: the rest is what they waited for.
            start.wait_for_all("tried", _MORE_S, "did not connect to the others")
        raise
    start.say("tried")
    prefixed = dist.PrefixStore("syncline", store)
    return TorchCommunicator(_world_group(), prefixed, owned=True, deadline=deadline, host_index=place.host_index)


class _Start:
    """How far each rank has come before there is a group, on the store."""

    def __init__(self, store: Store, place: Placement, deadline_s: float) -> None:
        self._store = store
        self._place = place
        self._deadline_s = deadline_s

    def say(self, word: str) -> None:
        self._store.set(f"{word}/{self._place.rank}", "")

    def wait_for_all(self, word: str, seconds: float, failing: str) -> None:
        """Until every rank has said the word; a DeadlineError that names those that have not."""
        self.say(word)
        keys = [f"{word}/{rank}" for rank in range(self._place.world_size)]
        end, pause_s = time.monotonic() + seconds, 0.001
        while not self._store.check(keys):
            if time.monotonic() > end:
                missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                raise DeadlineError(
                    f"{', '.join(map(self._place.name_of, missing))} {failing} within {self._deadline_s:g} s.",
                    action="See whether that process is stopped or stuck as it starts, or raise deadline_s.",
                    rank=self._place.rank,
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)


def _meet(meeting: Meeting, rank: int, deadline: timedelta) -> Store:
    interface = meeting.interface()
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if rank > 0:
        return dist.TCPStore(meeting.address, meeting.port, is_master=False, timeout=deadline)
    descriptor = meeting.listen().detach()
    return dist.TCPStore(
        meeting.address, meeting.port, is_master=True, timeout=deadline, wait_for_workers=False,
        master_listen_fd=descriptor,
    )  # fmt: skip


def adopt(group: dist.ProcessGroup | None, *, deadline: timedelta, host_index: int = 0) -> TorchCommunicator:
    """Use a group that the user has made; it stays the user's. Waits keep the group's own deadline."""
    group = group or _world_group()
    _adopted[group.group_name] += 1
    prefix = f"syncline/{group.group_name}/{_adopted[group.group_name]}"
    store = dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())
    return TorchCommunicator(group, store, owned=False, deadline=deadline, host_index=host_index)


_adopted: Counter[str] = Counter()
"""How often each group was adopted: communicators over one group must not share keys in the store."""


def forget_groups() -> None:
    """All groups are gone, and the ranks of the next ones, some of them new processes, meet on another store."""
    _adopted.clear()


def _world_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def flat(tensor: Tensor) -> Tensor:
    """A one-dimensional view of the tensor's memory, in memory order.

    Gloo takes contiguous tensors only, but a channels-last gradient is just as dense. Ranks must agree on strides;
    Checked sees to that.
    """
    if tensor.is_contiguous():
        return tensor.detach().view(-1)
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return tensor.detach().permute(0, 2, 3, 1).view(-1)
    raise CommunicationError(
        f"a tensor of shape {list(tensor.shape)} and strides {list(tensor.stride())} is not in one piece, "
        "row by row or channels last.",
        action="Make it contiguous before sending it.",
    )


def _flat_parts(operation: Operation) -> list[Tensor] | None:
    return None if operation.parts is None else [flat(part) for part in operation.parts]


_START: dict[str, Callable[[Operation, dist.ProcessGroup], dist.Work | None]] = {
    "all_reduce": lambda op, group: dist.all_reduce(flat(op.tensor), group=group, async_op=True),
    "all_gather": lambda op, group: dist.all_gather(_flat_parts(op), flat(op.tensor), group, async_op=True),
    "broadcast": lambda op, group: dist.broadcast(flat(op.tensor), group=group, async_op=True, group_src=op.peer),
    "gather": lambda op, group: dist.gather(
        flat(op.tensor), _flat_parts(op), group=group, async_op=True, group_dst=op.peer
    ),
    "scatter": lambda op, group: dist.scatter(
        flat(op.tensor), _flat_parts(op), group=group, async_op=True, group_src=op.peer
    ),
    "send": lambda op, group: dist.isend(flat(op.tensor), group=group, group_dst=op.peer),
    "receive": lambda op, group: dist.irecv(flat(op.tensor), group=group, group_src=op.peer),
}


def _translated(call: Callable[[], Result]) -> Result:
    try:
        return call()
    except CommunicationError:
        raise  # ours already: a tensor that cannot be sent
    except RuntimeError as error:
        raise translate(error) from error


def translate(error: RuntimeError) -> CommunicationError:
    """Our error for torch's: a deadline, or a lost peer. Torch tells them apart by text alone."""
    text = str(error)
    if "imed out" in text or "imeout" in text:
        return DeadlineError("the deadline passed.")
    return PeerLostError(f"the connection to another rank broke: {text.strip().splitlines()[0]}")
