"""Run `syncline …` for tests without loading torch each time: one process loads it once and forks for every command.

python cli_server.py: each line on stdin is a command (JSON); the exit code of each is a line on stdout. The ranks'
fork server of a command is forked too, where the command itself would start a fresh interpreter. Tests of signals and
of what a killed command leaves behind start the real program instead.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import multiprocessing.util
import os
import pkgutil
import signal
import sys
import tempfile
import traceback
from typing import Any, NoReturn

HELPERS = ("from multiprocessing.forkserver import main", "from multiprocessing.resource_tracker import main")
start_fresh = multiprocessing.util.spawnv_passfds


def load() -> None:
    """All of Syncline, and what commands would load late."""
    import syncline
    from syncline.launcher.engines import ENGINES

    for name in ("torch._dynamo", "matplotlib.figure", "matplotlib.backends.backend_svg"):
        importlib.import_module(name)
    for module in pkgutil.walk_packages(syncline.__path__, "syncline."):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                if error.name not in {row.package for row in ENGINES.values()}:
                    raise  # an engine's package may be missing


def become(command: dict[str, Any]) -> None:
    """What an exec of the program would do to this copy of the server."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for number, path in ((1, command["out"]), (2, command["err"])):
        with open(path, "wb") as file:
            os.dup2(file.fileno(), number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.chdir(command["folder"])
    os.environ.clear()
    os.environ.update(command["environment"])
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    sys.path[:] = [os.path.dirname(command["arguments"][0]), *paths, *sys.path[1:]]
    sys.argv = command["arguments"]
    tempfile.tempdir = None
    multiprocessing.util.spawnv_passfds = fork_helper  # type: ignore[assignment]


def fork_helper(path: Any, arguments: Any, keep: Any) -> int:
    """multiprocessing's fork server and tracker as copies of this process, as long as it has no other threads."""
    if not arguments[-1].startswith(HELPERS) or len(os.listdir("/proc/self/task")) > 1:
        return int(start_fresh(path, arguments, keep))
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(SystemExit):
            close_all_but(keep)
            exec(arguments[-1], {})
        os._exit(0)
    return pid


def close_all_but(keep: list[int]) -> None:
    begin = 3
    for descriptor in sorted({number for number in keep if number > 2}):
        os.closerange(begin, descriptor)
        begin = descriptor + 1
    os.closerange(begin, os.sysconf("SC_OPEN_MAX"))


def run_verb() -> NoReturn:
    """Without the interpreter's own end: to free all that is loaded takes a second, more than most commands need."""
    from syncline.launcher.rank_life import wind_down

    code: Any = 0
    try:
        run_command(sys.argv[1:])
    except SystemExit as leaving:
        code = leaving.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    wind_down()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_command(arguments: list[str]) -> None:
    from syncline.cli import main as syncline

    sys.argv[1:] = arguments
    syncline()


def main() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)
    load()
    gc.freeze()  # or every copy would copy what its collector looks at
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in iter(sys.stdin.readline, ""):
        pid = os.fork()
        if pid == 0:
            become(json.loads(line))
            run_verb()
        _, status = os.waitpid(pid, 0)
        os.write(answers, f"{os.waitstatus_to_exitcode(status)}\n".encode())


if __name__ == "__main__":
    main()
