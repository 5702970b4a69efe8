"""A function in a thread of its own, as `horovod.runner.util.threads` starts it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any


def in_thread(
    target: Callable[..., object], args: tuple[Any, ...] = (), name: str | None = None, daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:  # fmt: skip
    """The thread, which has started already. With `silent`, nobody hears of an exception in it."""
    if not isinstance(args, tuple):
        raise ValueError(f"args must be a tuple, not {type(args)}; write one argument as (argument,).")

    def call() -> None:
        with contextlib.suppress(BaseException) if silent else contextlib.nullcontext():
            target(*args)

    thread = threading.Thread(target=call, name=name, daemon=daemon)
    thread.start()
    return thread
