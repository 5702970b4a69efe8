"""hvd.elastic: train on when a rank is lost, or when ranks come and go."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from syncline.comm.torch_backend import forget_groups
from syncline.horovod.common.elastic import ObjectState, State, launcher_of_ranks, run_fn
from syncline.horovod.torch.basics import init, shutdown
from syncline.horovod.torch.elastic.sampler import ElasticSampler
from syncline.horovod.torch.elastic.state import TorchState
from syncline.launcher.adopt import horovod_variables, take_place

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]

Result = TypeVar("Result")

_PAUSE_SECONDS = 0.1


def run(func: Callable[..., Result]) -> Callable[..., Result]:
    """Decorate the function that trains; its first argument is the state. On HorovodInternalError it starts again
    from the last commit, on HostsUpdatedInterrupt from where it stands, with the ranks that there are then."""
    return run_fn(func, meet_again)


def meet_again(state: State) -> None:
    """Leave this world, wait for the next one and join it; leave for good if there is no rank for this process.

    A rank may be lost while the others meet: then they do it again."""
    launcher = launcher_of_ranks()
    assert launcher is not None
    while True:
        shutdown()
        forget_groups()
        place = launcher.next(state._commits)
        if place is None:
            sys.exit(0)
        take_place(place)
        os.environ.update(horovod_variables(place))
        try:
            init()
        except (RuntimeError, OSError):
            time.sleep(_PAUSE_SECONDS)
            continue
        return
