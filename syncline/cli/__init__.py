"""Composition root: the command line, one verb per question."""

from __future__ import annotations

import sys
import warnings
from typing import TextIO

from syncline.errors import Interrupted, RankFailed, SynclineError


def main() -> None:
    """Run a verb. Our own errors become one line on stderr and their exit code; nothing else is caught."""
    warnings.showwarning = _say_warning
    try:
        from syncline.cli.app import app

        app()
    except RankFailed as error:
        if error.traceback_text:
            print(error.traceback_text.rstrip(), file=sys.stderr)
        _fail(error)
    except SynclineError as error:
        _fail(error)
    except KeyboardInterrupt:
        _fail(Interrupted("Stopped by Ctrl-C."))
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
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h")  # a rank that was ended may have hidden the cursor
    print(f"syncline: {error}", file=sys.stderr, flush=True)
    sys.exit(error.exit_code)
