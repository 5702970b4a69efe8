"""Pickles for the way between launcher and rank.

Cloudpickle sends functions and classes of a script, a notebook or a lambda by value, where the standard pickle only
sends their names. It is imported on first use, to keep `import syncline` quick.
"""

from __future__ import annotations

from typing import Any


def pack(thing: object) -> bytes:
    import cloudpickle  # type: ignore[import-untyped]

    return bytes(cloudpickle.dumps(thing))


def unpack(data: bytes) -> Any:
    """Only for what our own processes wrote: a pickle can run any code."""
    import cloudpickle

    return cloudpickle.loads(data)
