"""What several tests share: ranks as threads and as processes, small models, small image sets."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import syncline
from syncline.comm import Communicator, instrumented
from syncline.comm.threads import ThreadCommunicator, ThreadWorld, run_threads
from syncline.comm.torch_backend import connect
from syncline.errors import CommunicationError, PlanError
from syncline.launcher.adopt import placement_from_environment
from syncline.methods import METHODS
from syncline.spans import EventLog
from syncline.sync import make_sync
from syncline.workload.data.batches import Batches, ImageBatches
from syncline.workload.data.images import ImageSet
from syncline.workload.data.synthetic import synthetic_images

Result = TypeVar("Result")
OnRank = Callable[[Communicator, EventLog], Result]
TORCHS_OWN_ABORT = "terminate called without an active exception"
"""What a process with torch's own DDP says now and then when it ends, after all its work."""


def on_threads(
    world_size: int, function: OnRank[Result], *, deadline_s: float = 60.0, hosts: Sequence[int] | None = None
) -> list[Result]:
    """function(communicator, log) on every rank, each a thread, with the communicator that the product uses."""

    def live(backend: Communicator) -> Result:
        log = EventLog(rank=backend.rank, world_size=backend.world_size)
        communicator = instrumented(backend, log, deadline_s=deadline_s)
        try:
            return function(communicator, log)
        finally:
            communicator.close()

    with one_compute_thread():
        return run_threads(world_size, live, deadline_s=deadline_s, hosts=hosts)


@contextmanager
def one_compute_thread() -> Iterator[None]:
    """Ranks that are threads would fight for the cores with each other's compute threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def on_processes(world_size: int, function: OnRank[Any], *, deadline_s: float = 60.0) -> list[Any]:
    """The same over Gloo, each rank a process."""
    return syncline.launch(_live_in_process, function, deadline_s, workers=world_size, threads=1)


def _live_in_process(function: OnRank[Any], deadline_s: float) -> Any:
    place = placement_from_environment()
    assert place is not None
    deadline = timedelta(seconds=deadline_s)
    backend = connect(place, backend="gloo", deadline=deadline)
    log = EventLog(rank=place.rank, world_size=place.world_size)
    communicator = instrumented(backend, log, deadline_s=deadline_s)
    result = function(communicator, log)
    if not isinstance(result, CommunicationError):  # a broken group may take minutes to close
        communicator.close()
    return result


def caught(function: Callable[[], object]) -> CommunicationError | None:
    """The communication error that a call raises, as a value: every rank's can be looked at."""
    try:
        function()
    except CommunicationError as error:
        return error
    return None


def runs_on_threads(method: str) -> bool:
    try:
        make_sync(method, ThreadCommunicator(ThreadWorld(1), 0))
    except PlanError:
        return False
    return True


MANY_WORKERS = [name for name, row in METHODS.items() if row.takes_turns and not row.alone]
"""Methods that average over ranks that torch starts; mpi and thread-replicas have tests of their own."""
NEED_NO_OPTIMIZER = [name for name in MANY_WORKERS if not METHODS[name].overlaps_steps]
"""Methods that DataParallel takes without an optimizer; test_ahead.py has the other."""
ON_THREADS = [method for method in MANY_WORKERS if runs_on_threads(method)]


class Tied(nn.Module):
    """One weight in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(4, 4)
        self.outward = nn.Linear(4, 4)
        self.outward.weight = self.inward.weight

    def forward(self, values: Tensor) -> Tensor:
        result: Tensor = self.outward(torch.relu(self.inward(values.flatten(1)[:, :4])))
        return result


def frozen_first_layer() -> nn.Module:
    model = small_mlp()
    model[1].requires_grad_(False)
    return model


def small_mlp() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 6 * 6, 5), nn.ReLU(), nn.Linear(5, 4))


def small_cnn() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 4 * 4, 4))


def channels_last_cnn() -> nn.Module:
    return small_cnn().to(memory_format=torch.channels_last)  # type: ignore[call-overload]


INTEGER_MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": small_mlp,
    "cnn": small_cnn,
    "tied": Tied,
    "frozen": frozen_first_layer,
    "channels-last": channels_last_cnn,
}
"""For images of 3x6x6 and 4 classes."""


@cache
def _integer_template(name: str) -> nn.Module:
    model = INTEGER_MODELS[name]()
    stream = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-2, 3, parameter.shape, generator=stream))
    return model


def integer_model(name: str) -> nn.Module:
    """A copy with small whole numbers as weights. Copied, because threads share torch's random generator."""
    return copy.deepcopy(_integer_template(name))


def integer_loss(module: nn.Module, rank: int, turn: int = 0) -> Tensor:
    """A loss whose gradients are multiples of 12: their mean over 1 to 4 ranks is exact in any order of summation."""
    stream = torch.Generator().manual_seed(100 * turn + rank)
    images = torch.randint(-2, 3, (5, 3, 6, 6), generator=stream).float()
    factors = 12.0 * torch.randint(-3, 4, (5, 4), generator=stream)
    return (module(images) * factors).sum()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@cache
def expected_mean(name: str, world_size: int, turns: int = 1) -> dict[str, Tensor]:
    """The ranks one after the other, in plain PyTorch."""
    model = integer_model(name)
    for rank in range(world_size):
        for turn in range(turns):
            integer_loss(model, rank, turn).backward()
    sums = gradients(model)
    for gradient in sums.values():
        assert torch.equal(gradient, gradient.round()), "the test's own numbers must be exact"
        assert gradient.abs().max() < 2**22
    assert any(gradient.abs().max() > 0 for gradient in sums.values())
    return {key: gradient / world_size for key, gradient in sums.items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@cache
def images(num_train: int = 200, num_test: int = 47) -> ImageSet:
    return synthetic_images(num_train, num_test)


def small_batches(seed: int = 3) -> Batches:
    return ImageBatches(images(), seed=seed, channels_last=False)
