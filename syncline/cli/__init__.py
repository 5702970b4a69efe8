"""Composition root: the command line, one verb per question."""

from __future__ import annotations

import errno
import signal
import sys
import warnings
from collections.abc import Callable
from typing import TextIO

from syncline.errors import Interrupted, RankFailed, SynclineError, UsageError
from syncline.units import printable

OF_THE_MACHINE = (errno.ENAMETOOLONG, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ELOOP)
"""Errors of the system that are no fault of the code, wherever they come up."""


def main() -> None:
    """Run a verb."""

    def run() -> None:
        from syncline.cli.app import app

        app()

    told(run)


def told(command: Callable[[], object]) -> None:
    """Run a command. Our own errors, and those of the machine, become one line on stderr and their exit code; nothing
    else is caught."""
    warnings.showwarning = _say_warning
    try:
        command()
    except RankFailed as error:
        if error.traceback_text:
            print(error.traceback_text.rstrip(), file=sys.stderr)
        _fail(error)
    except SynclineError as error:
        _fail(error)
    except KeyboardInterrupt:
        _fail(Interrupted("Stopped by Ctrl-C."))
    except OSError as error:
        if error.errno not in OF_THE_MACHINE:
            raise
        where = f"{printable(str(error.filename))[:300]}: " if error.filename else ""
        _fail(UsageError(f"{where}{error.strerror}."))
    except SystemExit as leaving:
        if leaving.code == Interrupted.exit_code:  # typer makes this of a Ctrl-C, without a word
            _fail(Interrupted("Stopped by Ctrl-C."))
        raise


def _say_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None,
    line: str | None = None,
) -> None:  # fmt: skip
    """One line for people who gave a command; where in the code it came from does not help them."""
    print(f"syncline: {message}", file=sys.stderr, flush=True)


def _fail(error: SynclineError) -> None:
    if isinstance(error, Interrupted):  # all has ended: another Ctrl-C has nothing to interrupt but these words
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h")  # a rank that was ended may have hidden the cursor
    print(f"syncline: {error}", file=sys.stderr, flush=True)
    sys.exit(error.exit_code)
