"""Composition: the run folder as a process finds it, whether it sees it or not.

A process that does not see it works in a folder of its own, for as long as the block lasts. What grows there (event
logs, output) is carried to the run folder every two seconds and at the end; checkpoints are written there directly.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from syncline.errors import RunFolderError
from syncline.launcher import watch
from syncline.launcher.home import Address, Courier
from syncline.store import RunFolder


@contextmanager
def reached(run: RunFolder, ranks: Iterable[int], within: str | None = None) -> Iterator[RunFolder]:
    """The run folder, of which this process writes these ranks' part. A folder of its own is made in `within`, or
    where temporary files go."""
    if run.home is None or run.is_far:
        yield run
    elif _sees(run, run.home.created):
        yield replace(run, home=None)
    else:
        with _carried(run.home, ranks, within) as path:
            yield replace(run, path=path, is_far=True)


def _sees(run: RunFolder, created: str) -> bool:
    """Whether the folder of that name is here the one that the run's owner has."""
    with suppress(RunFolderError):
        return bool(run.info()["created"] == created)
    return False


@contextmanager
def _carried(home: Address, ranks: Iterable[int], within: str | None) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="syncline-run-", dir=within))
    try:
        courier = Courier(path, home, ranks)
    except OSError as error:
        shutil.rmtree(path, ignore_errors=True)
        raise RunFolderError(f"cannot reach the run folder {home.path}: {error.strerror}.") from None

    def end() -> None:
        try:
            courier.close()
        except OSError as error:
            print(
                f"syncline: the last logs did not reach {home.path}: {error.strerror}.", file=sys.stderr, flush=True
            )
        shutil.rmtree(path, ignore_errors=True)

    watch.on_stop(end)
    try:
        yield path
    finally:
        end()
