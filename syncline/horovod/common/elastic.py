"""Elastic training: state that outlives the loss of a rank, and the function that trains with it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from syncline.horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from syncline.launcher.here.worlds import Worlds, worlds
from syncline.launcher.outcome import kind_of

Result = TypeVar("Result")


class State:
    """What all ranks must agree on. Subclasses say how to save, restore and sync it."""

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._reset_callbacks: list[Callable[[], object]] = []
        self._commits = 0
        """The rank with the most of them has the newest state, and gives it to the others after a reset."""

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Call these after the ranks have met anew, before state is synced: to scale a learning rate, for example."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Save the state; then see whether ranks come or go. To this state the ranks return if one of them is lost.

        Raises HostsUpdatedInterrupt."""
        self.save()
        self._commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt, on all ranks at once, if the launcher wants more ranks or fewer. Collective if
        the launcher can replace ranks; otherwise it does nothing."""
        launcher = launcher_of_ranks()
        if launcher is not None and self._bcast_object(launcher.wants_others()):
            raise HostsUpdatedInterrupt

    def save(self) -> None:
        """Keep a copy in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Return to the last copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Take over rank 0's state, and keep it as the last copy. Collective."""
        raise NotImplementedError

    def reset(self) -> None:
        """For subclasses that have to forget something when ranks have met anew."""
        return


class ObjectState(State):
    """Python values, each an attribute of this object."""

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state = kwargs
        self._set_attributes()

    def save(self) -> None:
        # A copy: a list that the script goes on filling would change the commit.
        self._saved_state = {name: copy.deepcopy(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        self._set_attributes()

    def sync(self) -> None:
        if self._saved_state:
            values = {name: getattr(self, name) for name in self._saved_state}
            self._saved_state = self._bcast_object(values)
            self._set_attributes()

    def _set_attributes(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, copy.deepcopy(value))


def run_fn(func: Callable[..., Result], reset: Callable[[State], object]) -> Callable[..., Result]:
    """`func(state, …)` that goes on when a rank is lost, from the last commit, and when ranks come or go, from where
    it stands. `reset` meets the ranks of the new world."""

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Result:
        is_whole = True
        while True:
            try:
                if not is_whole:
                    reset(state)
                    state.on_reset()
                    is_whole = True
                state.sync()
                state._commits = state._bcast_object(state._commits)
                return func(state, *args, **kwargs)
            except HostsUpdatedInterrupt as interrupt:
                _check_launcher(interrupt)
                is_whole = False
            except RuntimeError as error:
                # Also in torch's own words, and ours: a script may talk to other ranks without Horovod's names.
                if not isinstance(error, HorovodInternalError) and kind_of(error) != "communication":
                    raise
                _check_launcher(error)
                state.restore()
                is_whole = False

    return wrapper


@functools.cache
def launcher_of_ranks() -> Worlds | None:
    """The launcher of this process, if it can replace ranks."""
    return worlds()


def _check_launcher(error: Exception) -> None:
    if launcher_of_ranks() is None:
        error.add_note("A lost rank is replaced only if the run is elastic: horovodrun --min-np N …")
        raise error
