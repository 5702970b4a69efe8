"""Loaded by the process that ranks are forked from, and by no other: it ends at once when its launcher is gone.

It has nothing to tidy up, and on a busy machine the interpreter takes seconds to take torch apart."""

from __future__ import annotations

import atexit
import functools
import os
import sys


@atexit.register
def _end() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


os.register_at_fork(after_in_child=functools.partial(atexit.unregister, _end))  # ranks end in their own way
