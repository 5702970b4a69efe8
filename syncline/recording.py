"""record: the same accounting around a user's own loop.

    with syncline.record(model, optimizer, "run-folder"):
        for inputs, targets in loader:
            loss_of(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()

`syncline explain run-folder` then says where the time went. Steps are found by hooks: a step begins where the one
before it ended, its data phase ends when the model is called, its forward when backward reaches the output (so the
loss is part of it), its backward with the last gradient, and the step with the optimiser's update. Several forwards
before one update are one step. A forward without gradients (evaluation) belongs to no step.
"""

from __future__ import annotations

import json
import multiprocessing
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from syncline import world
from syncline.accounting.statistics import timing
from syncline.comm import Communicator
from syncline.comm.clock import note_clock
from syncline.comm.torch_backend import adopt
from syncline.data_parallel import DataParallel
from syncline.errors import RunFolderError, SynclineError, UsageError
from syncline.methods import BASELINE, CONTROL, METHODS
from syncline.plan import Plan
from syncline.spans import EventLog
from syncline.store import RunFolder, create_run
from syncline.sync.ddp import DDP, trace_transfers
from syncline.words import MODELS

MESSAGE_BYTES = 4096
_recorded: weakref.WeakSet[nn.Module | torch.optim.Optimizer] = weakref.WeakSet()
"""What is being recorded at this moment."""


def record(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str | Path | None = None) -> Recording:
    """Context manager. Collective: call it on every rank with the same arguments; all write to one folder.

    `model` is what the loop calls: a plain module on one process, syncline.DataParallel, or torch's
    DistributedDataParallel; or a plain module whose optimizer is Horovod's DistributedOptimizer. Without a folder, it
    makes one below runs/.
    """
    return Recording(model, optimizer, Path(folder) if folder is not None else None)


class Recording:
    """`path` is the run folder, once the block has begun; `notes` says what cannot be seen."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path | None) -> None:
        _check(model, optimizer)
        self.model = model
        self.optimizer = optimizer
        self.notes: list[str] = []
        self._folder = folder
        self._world = _World(model, optimizer)
        self._hooks: list[RemovableHandle] = []
        self._used = False
        self._hold = ExitStack()

    @property
    def path(self) -> Path:
        return self._run.path

    def __enter__(self) -> Self:
        if self._used:
            raise UsageError("this recording has already been used.", action="Call syncline.record again.")
        if self.model in _recorded or self.optimizer in _recorded:
            raise UsageError("this model or optimizer is already being recorded.", action="End that recording first.")
        self._used = True
        self._run = self._world.agree_on(self._create)
        rank, size = self._world.rank, self._world.size
        host, threads = self._world.host, torch.get_num_threads()
        if rank == 0:  # so that everybody sees that it runs
            self._hold.enter_context(self._run.locked())
        self._log = EventLog(self._run.events(rank), rank=rank, world_size=size, host=host, threads=threads)
        if self._world.communicator is not None:
            note_clock(self._world.communicator, self._log)
        self._log.method = self._world.method
        self._world.trace(self._log, self.notes)
        self._steps = _Steps(self._log)
        _recorded.update((self.model, self.optimizer))
        self._hooks = self._steps.watch(self.model, self.optimizer)
        self._stop_listening = world.listen(self._steps.on_talk)
        self._world.tell_of_waits(self._steps.on_sync)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._stop_listening()
        _recorded.difference_update((self.model, self.optimizer))
        self._world.untrace()
        self._log.close()
        if self._world.rank == 0:
            self._run.write_summary(self._summary())
            stopped = isinstance(error, KeyboardInterrupt)
            self._run.set_status("finished" if error is None else "stopped" if stopped else "failed")
        self._hold.close()

    def _create(self) -> RunFolder:
        """As a plan, so that every reader of run folders understands it; what a plan cannot say has its default."""
        kind = type(self._world.module)
        name = kind.__name__.lower() if kind.__name__.lower() in MODELS else f"{kind.__module__}:{kind.__qualname__}"
        workers = 1 if METHODS[self._world.method].world == "worker" else self._world.size
        plan = Plan(model=name, method=self._world.method, workers=workers, threads=torch.get_num_threads())
        return create_run(self._folder, kind="record", plan=plan, label=f"{self._world.method}-{self._world.size}")

    def _summary(self) -> dict[str, Any]:
        """Of rank 0's own steps; `syncline explain` covers all ranks."""
        measured = timing(self._steps.seconds, warmup=1)
        return {
            "method": self._world.method,
            "workers": self._world.size,
            "threads": torch.get_num_threads(),
            "compute": "real",
            "steps": len(self._steps.seconds),
            "step": asdict(measured) if measured else None,
            "notes": self.notes,
        }


def _check(model: object, optimizer: object) -> None:
    needed = ((model, nn.Module, "the model that your loop calls"),
              (optimizer, torch.optim.Optimizer, "the optimizer: its step() ends a step"))  # fmt: skip
    for given, kind, what in needed:
        if not isinstance(given, kind):
            raise UsageError(
                f"record needs {what}, but got {'None' if given is None else f'a {type(given).__name__}'}.",
                action="Call syncline.record(model, optimizer).",
            )


class _Steps:
    """From hooks to phases and steps. All stamps are of the thread that runs the loop, or of its backward."""

    def __init__(self, log: EventLog) -> None:
        self.seconds: list[float] = []
        self._log = log
        self._number = 0
        self._open = False
        self._step_start = self._free_since = time.monotonic_ns()
        """Since when nothing that is recorded has been going on: what follows until forward is data."""
        self._talks: list[tuple[int, int]] = []
        self._children = _pids_of_children()
        if self._children:
            self._log.add("loader", started=0, workers=len(self._children))
        self._forward_start: int | None = None
        self._backward_start: int | None = None
        self._last_ready: int | None = None
        self._update_start: int | None = None

    def watch(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[RemovableHandle]:
        hooks = [
            model.register_forward_pre_hook(self._on_forward),
            model.register_forward_hook(self._on_output, always_call=True),
            optimizer.register_step_pre_hook(self._on_update),
            optimizer.register_step_post_hook(self._on_updated),
        ]
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return hooks + [parameter.register_post_accumulate_grad_hook(self._on_ready) for parameter in trained]

    def on_talk(self, start_ns: int, end_ns: int) -> None:
        """The loop exchanged figures or wrote a checkpoint."""
        self._talks.append((start_ns, end_ns))

    def on_sync(self, start_ns: int, end_ns: int) -> None:
        """The loop waited for averages, outside backward."""
        if self._open:
            self._phase("sync", start_ns, end_ns)
            self._free_since = end_ns

    def _on_forward(self, _model: nn.Module, _inputs: Any) -> None:
        if not torch.is_grad_enabled() or self._update_start is not None:
            return  # evaluation; or an optimiser that calls the model itself, and then all of it is update
        now = time.monotonic_ns()
        self._end_forward(now)
        if not self._open:
            self._open = True
            self._log.step = self._number
            self._step_start = self._free_since
        for start, end in self._talks:  # figures and checkpoints: nobody loads data meanwhile
            if start >= self._free_since:
                self._phase("data", self._free_since, start)
                self._free_since = end
        self._talks.clear()
        self._phase("data", self._free_since, now)
        self._note_loader()
        self._forward_start = self._free_since = now

    def _on_output(self, _model: nn.Module, _inputs: Any, outputs: Any) -> None:
        now = time.monotonic_ns()
        if not torch.is_grad_enabled():
            if not self._open:
                self._free_since = now  # between steps: the next one begins after the evaluation
            return
        if self._update_start is not None:
            return
        self._free_since = now
        for output in tree_leaves(outputs):
            if isinstance(output, Tensor) and output.requires_grad and output.grad_fn is not None:
                output.register_hook(self._on_backward)

    def _on_backward(self, _gradient: Tensor) -> None:
        """Backward has come through the loss to the model's output."""
        if self._backward_start is None and self._update_start is None and self._open:
            self._begin_backward(time.monotonic_ns())

    def _on_ready(self, _parameter: Tensor) -> None:
        if not self._open or self._update_start is not None:
            return
        self._last_ready = time.monotonic_ns()
        if self._backward_start is None:  # backward did not pass the output that we know
            self._begin_backward(self._free_since)

    def _begin_backward(self, now: int) -> None:
        self._end_forward(now)
        self._backward_start = now
        # Twice, because torch's DDP waits for its transfers in a callback that comes after the first.
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: engine.queue_callback(self._end_backward))

    def _end_forward(self, now: int) -> None:
        if self._forward_start is not None:
            self._phase("forward", self._forward_start, now)
            self._forward_start, self._free_since = None, now

    def _end_backward(self) -> None:
        now = time.monotonic_ns()
        if self._backward_start is None:
            return
        ready = self._last_ready or now
        self._phase("backward", self._backward_start, ready)
        self._phase("sync", ready, now)
        self._backward_start = self._last_ready = None
        self._free_since = now

    def _on_update(self, _optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if self._open:
            now = time.monotonic_ns()
            self._end_forward(now)
            self._update_start = now

    def _on_updated(self, _optimizer: Any, _args: Any, _kwargs: Any) -> None:
        now = time.monotonic_ns()
        if self._update_start is not None:
            self._phase("update", self._update_start, now)
            self._log.add("step", start=self._step_start, end=now)
            self._log.flush()
            self.seconds.append((now - self._step_start) / 1e9)
            self._number += 1
            self._log.step = -1
            self._open, self._update_start = False, None
        self._backward_start = self._last_ready = self._forward_start = None
        self._free_since = now

    def _note_loader(self) -> None:
        """Processes that were not there at the last forward are a data loader's: it starts them for each epoch."""
        children = _pids_of_children()
        if children - self._children:
            self._log.add("loader", started=len(children - self._children), workers=len(children))
        self._children = children

    def _phase(self, name: str, start: int, end: int) -> None:
        self._log.add("phase", name=name, start=start, end=end)


class _World:
    """Who takes part, and how the transfers of this kind of model can be seen."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.rank, self.size, self.host = 0, 1, 0
        self.method, self.module = BASELINE, model
        self.communicator: Communicator | None = None
        self._model = model
        averaging: Any = vars(optimizer).get("averaging")
        self._averaging = averaging if hasattr(averaging, "communicator") else None
        """Of an optimiser that averages by itself, in buckets, as Horovod's does."""
        if self._averaging is not None:
            self.communicator, self.method = self._averaging.communicator, self._averaging.method
        elif isinstance(model, DataParallel):
            self.communicator, self.method, self.module = model.communicator, model.method, model.module
        elif isinstance(model, DistributedDataParallel):
            deadline = timedelta(seconds=Communicator.deadline_s)
            self.communicator = adopt(model.process_group, deadline=deadline, host_index=world.host_index())
            self.method, self.module = CONTROL, model.module
        elif dist.is_initialized() and dist.get_world_size() > 1:
            raise UsageError(
                f"a plain module on {dist.get_world_size()} ranks does not say how its gradients are averaged.",
                action="Record what you call in the loop: syncline.DataParallel or DistributedDataParallel.",
            )
        if self.communicator is not None:
            self.rank, self.size = self.communicator.rank, self.communicator.world_size
            self.host = self.communicator.host_index

    def trace(self, log: EventLog, notes: list[str]) -> None:
        model = self._model
        if self._averaging is not None:
            self._averaging.log.also = log
        elif isinstance(model, DataParallel):
            model.log.also = log
            if isinstance(model.sync, DDP):
                model.sync.trace(model.log)
        elif isinstance(model, DistributedDataParallel) and not trace_transfers(model, log):
            notes.append("a communication hook is already registered: its transfers cannot be seen.")

    def tell_of_waits(self, on_sync: Callable[[int, int], None]) -> None:
        if self._averaging is not None:
            self._averaging.on_synchronized = on_sync

    def untrace(self) -> None:
        if self._averaging is not None:
            self._averaging.log.also = self._averaging.on_synchronized = None
        elif isinstance(self._model, DataParallel):
            self._model.log.also = None
        elif isinstance(self._model, DistributedDataParallel):
            trace_transfers(self._model, EventLog(keep=False))  # torch's class keeps its hook for good

    def agree_on(self, create: Callable[[], RunFolder]) -> RunFolder:
        """Rank 0 makes the folder and tells the others, or what was wrong."""
        if self.communicator is None or self.size == 1:
            return create()
        message = {}
        if self.rank == 0:
            try:
                message = {"path": str(create().path.resolve())}
            except SynclineError as error:
                message = {"error": error.message, "action": error.action}
        message = _from_rank_0(self.communicator, message)
        if "error" in message:
            raise RunFolderError(message["error"], action=message["action"])
        return RunFolder(Path(message["path"]))


def _pids_of_children() -> set[int | None]:
    return {child.pid for child in multiprocessing.active_children()}


def _from_rank_0(communicator: Communicator, message: dict[str, str]) -> dict[str, str]:
    content = json.dumps(message).encode().ljust(MESSAGE_BYTES)
    buffer = torch.tensor(list(content), dtype=torch.uint8, device=communicator.device)
    with communicator.scope("record"):
        communicator.broadcast(buffer, label="run folder")
    received: dict[str, str] = json.loads(bytes(buffer.tolist()))
    return received
