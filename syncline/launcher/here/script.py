"""A script as every rank: it finds what torchrun would give it, and ends as it would there.

Torchrun runs `python -u script.py …` in a new process. A rank is forked from a server that has loaded torch, so what
a new process would have is put back here: its arguments, path, streams, main module and multiprocessing's defaults.
"""

from __future__ import annotations

import io
import multiprocessing
import multiprocessing.process
import sys
import types
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import TextIO

from syncline.errors import PlanError
from syncline.launcher.here import run_for_user


def launch_script(
    script: Path,
    arguments: Sequence[str],
    *,
    workers: int,
    threads: int | None,
    log_dir: Path | None,
    port: int,
    all_ranks: bool,
) -> None:
    """Run the script on every rank, to its end. An exit code of 0 is a success, however the script came to it."""
    run_for_user(
        run_script, script_arguments(script, arguments), workers=workers, threads=threads, log_dir=log_dir,
        port=port, all_ranks=all_ranks, is_script=True,
    )  # fmt: skip


def script_arguments(script: Path, arguments: Sequence[str]) -> tuple[str, list[str], list[str]]:
    """What `run_script` takes."""
    if not script.is_file():
        raise PlanError(f"there is no script {script}.")
    # What Python put there is where the launcher's own program lies.
    path = sys.path if sys.flags.safe_path else [str(script.resolve().parent), *sys.path[1:]]
    return str(script), list(arguments), path


def run_script(script: str, arguments: list[str], path: list[str]) -> None:
    sys.argv = [script, *arguments]
    sys.path[:] = path
    _be_a_process_of_its_own()
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.BufferedReader(io.FileIO(0)))  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _unbuffered(sys.stdout)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _unbuffered(sys.stderr)  # type: ignore[misc]
    file = str(Path(script).absolute())
    main = types.ModuleType("__main__")
    vars(main).update(__file__=file, __cached__=None, __loader__=SourceFileLoader("__main__", file))
    # It stays there: threads and exit functions of the script still need it when the script has come to its end.
    sys.modules["__main__"] = main
    with io.open_code(file) as source:
        code = compile(source.read(), file, "exec", dont_inherit=True)
    exec(code, vars(main))


def _be_a_process_of_its_own() -> None:
    """Code that asks whether it is a child of multiprocessing must not hear yes."""
    multiprocessing.current_process().name = "MainProcess"
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]


def _unbuffered(stream: TextIO) -> io.TextIOWrapper:
    """As with `python -u`: what a script printed is there, also after os._exit."""
    stream.flush()
    raw = io.FileIO(stream.fileno(), "wb", closefd=False)
    return io.TextIOWrapper(raw, encoding=stream.encoding, errors=stream.errors, newline="\n", write_through=True)
