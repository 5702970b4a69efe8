"""Environment variables for a while."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Inside, the process and what it starts find these variables; those that are None stay as they are."""
    given = {name: text for name, text in variables.items() if text is not None}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, text in before.items():
            if text is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = text
