"""Horovod's torch API on Syncline: `import syncline.horovod.torch as hvd`.

`python -m syncline.horovod.install` gives it the name `horovod` too, for scripts that run unchanged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from syncline.horovod.runner import run

__version__ = "0.28.1+syncline"
__all__ = ["__version__", "run"]


def __getattr__(name: str) -> object:
    """Late: the runner loads the launcher, which a rank does not need."""
    if name == "run":
        from syncline.horovod.runner import run

        return run
    raise AttributeError(f"module 'syncline.horovod' has no attribute {name!r}")
