"""What runs in each rank that horovodrun or horovod.run has started."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from syncline.errors import UsageError
from syncline.launcher import watch
from syncline.launcher.adopt import Placement, horovod_variables, placement_from_environment
from syncline.launcher.here.script import run_script, script_arguments
from syncline.machine import end_with

Call = tuple[Callable[..., Any], tuple[Any, ...]]


def call_of(command: Sequence[str]) -> Call:
    """A Python script runs in the rank's own process, which has torch loaded; any other program takes its place."""
    program, *rest = command
    while rest[:1] == ["-u"]:  # as it is anyway
        rest = rest[1:]
    if _is_this_python(program) and rest and not rest[0].startswith("-"):
        return run_script, script_arguments(Path(rest[0]), rest[1:])
    if shutil.which(program) is None:
        raise UsageError(f"there is no program {program}.", action="Write it as: horovodrun -np 4 python train.py")
    return _become, (list(command),)


def run_rank(call: Call, output: str | None) -> Any:
    """The user's function or program, with Horovod's variables and with its output where the user wants it."""
    place = placement_from_environment()
    assert place is not None
    tell(place)
    if output is not None:
        _redirect(output_files(output, place.rank, place.world_size))
    function, args = call
    return function(*args)


def tell(place: Placement) -> None:
    """The variables that scripts read."""
    os.environ.update(horovod_variables(place))
    os.environ.update(HOROVOD_HOSTNAME=socket.gethostname(), HOROVOD_CONTROLLER="gloo", HOROVOD_CPU_OPERATIONS="gloo")


def output_files(folder: str, rank: int, world_size: int) -> list[Path]:
    """As Horovod names them: rank.0/stdout, with as many digits as the last rank has."""
    name = f"rank.{rank:0{len(str(world_size - 1))}}"
    return [Path(folder, name, stream) for stream in ("stdout", "stderr")]


def _redirect(files: list[Path]) -> None:
    for number, path in enumerate(files, 1):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(descriptor, number)
        os.close(descriptor)


def _is_this_python(program: str) -> bool:
    if program in ("python", "python3"):  # the one that Syncline runs in, where the shell would find another
        return True
    found = shutil.which(program)
    return found is not None and os.path.samefile(found, sys.executable) and Path(found).parent == _bin()


def _bin() -> Path:
    """Virtual environments share one interpreter file: the folder tells them apart."""
    return Path(sys.executable).parent


def _become(command: list[str]) -> None:
    """Another program in place of this one. It handles signals itself, and ends with the launcher."""
    end_with(os.getppid())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, watch.STOP_SIGNALS)
    if command[0] in ("python", "python3"):
        command = [sys.executable, *command[1:]]
    os.execvp(command[0], command)
