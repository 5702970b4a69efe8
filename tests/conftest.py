"""What the end-to-end tests share: the command line in a folder of its own, and a check that nothing is left behind.

Every process that a test starts inherits a mark in its environment and a private folder for temporary files. So at
the end of the session what is left can be told from what other people run on the same machine. Tests run side by
side in several worker processes (pytest-xdist); each is a session of its own, and the others are such other people.
"""

from __future__ import annotations

import functools
import inspect
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.util import Finalize
from pathlib import Path
from types import CodeType, FunctionType

import pytest

MARK = "SYNCLINE_TEST_SESSION"
SETTLE_SECONDS = 30.0
LONGEST_TEMPORARY_FOLDER = 40
"""Characters. Sockets are made some 50 characters below, and the path of a socket has at most 107."""
SHARED_FOLDERS = (Path("/dev/shm"), Path("/run/netns"))
SYNCLINE = Path(sys.executable).with_name("syncline")

Cli = Callable[..., "subprocess.CompletedProcess[str]"]

USER_MODEL = '''
"""A user's model: convolution and batch norm; says which process it lives in; slow or broken when asked to be."""
import os, time
from pathlib import Path
import torch
from torch import nn

RANK = os.environ.get("RANK", "0")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 3, stride=4), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1),
            nn.Linear(4 * 8 * 8, 10),
        )
        self.tied = self.layers[0].weight  # one parameter under two names
        self.register_buffer("scale", torch.ones(1), persistent=False)
        self.calls = 0
        if "PIDS" in os.environ:
            Path(os.environ["PIDS"], RANK).write_text(str(os.getpid()))

    def forward(self, images):
        self.calls += 1
        time.sleep(float(os.environ.get("SLOW", 0)))
        if RANK == os.environ.get("BROKEN") and self.calls == 5:
            raise ArithmeticError("my own mistake")
        return self.scale * self.layers(images)
'''


@pytest.fixture
def user_folder(tmp_path: Path) -> Path:
    """A folder with a user's module `user_model`; the command line finds it there."""
    folder = tmp_path / "user"
    folder.mkdir()
    (folder / "user_model.py").write_text(USER_MODEL)
    return folder


def cli_environment(**extra: str) -> dict[str, str]:
    """The session's environment without what the developer's shell may say about data."""
    return {**{name: text for name, text in os.environ.items() if name != "SYNCLINE_DATA"}, **extra}


@pytest.fixture
def cli(tmp_path: Path, cli_server: CliServer) -> Cli:
    """Run `syncline …` in an empty folder, to its end."""
    folder = tmp_path / "work"
    folder.mkdir()

    def run(*arguments: object, cwd: Path = folder, **extra: str) -> subprocess.CompletedProcess[str]:
        return cli_server.run(arguments, cwd, cli_environment(**extra))

    return run


@pytest.fixture(scope="session")
def cli_server(_nothing_is_left_behind: None) -> Iterator[CliServer]:
    """A process that has torch loaded and forks for every command."""
    server = CliServer()
    yield server
    server.close()


class CliServer:
    """See cli_server.py. It starts with the first command."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(
        self, arguments: Iterable[object], folder: Path, environment: Mapping[str, str]
    ) -> subprocess.CompletedProcess[str]:
        command = [str(SYNCLINE), *map(str, arguments)]
        with tempfile.TemporaryDirectory() as scratch:
            out, err = Path(scratch, "out"), Path(scratch, "err")
            places = {"folder": str(folder), "out": str(out), "err": str(err)}
            code = self._ask({"arguments": command, "environment": dict(environment), **places})
            return subprocess.CompletedProcess(command, code, out.read_text(), err.read_text())

    def _ask(self, command: dict[str, object]) -> int:
        if self._process is None:
            server = [sys.executable, str(Path(__file__).with_name("cli_server.py"))]
            self._process = subprocess.Popen(server, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(command), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()


@pytest.fixture
def quick_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks say within a fraction of a second that they are stuck."""
    from syncline.comm import checked, whereabouts

    monkeypatch.setattr(whereabouts, "STALLED_AFTER_S", 0.1)
    monkeypatch.setattr(whereabouts, "LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(whereabouts, "ANSWERS_WITHIN_S", 0.3)
    monkeypatch.setattr(checked, "SURE_AFTER_S", 0.3)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """A shell that starts tests in the background has them ignore Ctrl-C, which what they start would inherit.
    And a worker's tmp_path leaves room for the path of a socket."""
    if hasattr(config, "workerinput") and config.option.basetemp:
        config.option.basetemp = str(Path(config.option.basetemp).with_name(config.workerinput["workerid"]))
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)  # so before pytest-xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Tests that share a fixture of their module run in one worker, so that it is made once.

    And those that start processes are marked: what is left (`-m "not processes"`) takes little time. So it comes last
    where tests run side by side: no worker is left alone with a long test at the end.
    """
    for item in items:
        assert isinstance(item, pytest.Function)
        fixtures = [definitions[-1] for definitions in item._fixtureinfo.name2fixturedefs.values()]
        if any(fixture.scope == "module" for fixture in fixtures) and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
        own = [fixture.func for fixture in fixtures if fixture.argname != _nothing_is_left_behind.__name__]
        if any(starts_processes(function) for function in (item.function, *own)):
            item.add_marker(pytest.mark.processes)
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.get_closest_marker("processes") is None)
    return (yield)


STARTERS = {
    "subprocess",
    "multiprocessing",
    "spawn",
    "launch",
    "run_ranks",
    "run_ranks_mpi",
    "EmulatedCluster",
    "in_child",
}


def starts_processes(function: Callable[..., object]) -> bool:
    """Whether a test's code names what starts processes, itself or through the functions of tests that it names."""
    seen, ahead = set(), {function}
    while ahead:
        seen |= ahead
        if any(names_in(one.__code__) & STARTERS for one in ahead):
            return True
        ahead = set().union(*map(named_functions, ahead)) - seen
    return False


@functools.cache
def named_functions(function: FunctionType) -> set[FunctionType]:
    """Functions and methods of classes, all in the folder of tests, that a function names."""
    things = [function.__globals__.get(name) for name in names_in(function.__code__)]
    methods = [method for thing in things if isinstance(thing, type) for method in vars(thing).values()]
    functions = (inspect.unwrap(thing) for thing in (*things, *methods) if isinstance(thing, FunctionType))
    return {thing for thing in functions if isinstance(thing, FunctionType) and is_of_tests(thing)}


@functools.cache
def names_in(code: CodeType) -> set[str]:
    return set(code.co_names).union(*(names_in(part) for part in code.co_consts if isinstance(part, CodeType)))


def is_of_tests(function: FunctionType) -> bool:
    return Path(function.__code__.co_filename).parent == Path(__file__).parent


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    """Processes, listening sockets, temporary files, shared memory, namespaces, bridges, mounts."""
    mark = uuid.uuid4().hex
    before = {folder: entries(folder) for folder in SHARED_FOLDERS}
    mounts = emulation_mounts()
    scratch = tempfile.mkdtemp(prefix="session-", dir=short_temporary_folder())
    # After the fork server's own folder, which is inside and is removed with priority -100.
    Finalize(None, shutil.rmtree, (scratch,), {"ignore_errors": True}, exitpriority=-200)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # tmp_path stays where people look for it
        patch.setenv(MARK, mark)
        patch.setenv("TMPDIR", scratch)
        patch.setattr(tempfile, "tempdir", None)
        yield
        wait_for_none(lambda: leftovers(mark, Path(scratch), before, mounts), SETTLE_SECONDS)


@pytest.fixture(scope="session", autouse=True)
def _ranks_have_torch_loaded(_nothing_is_left_behind: None) -> Iterator[None]:
    """Whichever test starts the fork server of this process: those that train need what their plans would preload."""
    from syncline.launcher import places, starting

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(starting, "DEFAULT_PRELOAD", (*starting.DEFAULT_PRELOAD, *places.PRELOAD))
        yield


def short_temporary_folder() -> str:
    """Where sockets can be made, also if whoever runs the tests works in a deep folder."""
    folder = tempfile.gettempdir()
    return folder if len(folder) <= LONGEST_TEMPORARY_FOLDER else "/tmp"


def wait_for_none(find: Callable[[], list[str]], seconds: float) -> None:
    """Fail with what was found unless it is gone in time: a process needs a moment to end."""
    deadline = time.monotonic() + seconds
    while found := find():
        assert time.monotonic() < deadline, "left behind:\n" + "\n".join(found)
        time.sleep(0.1)


def leftovers(mark: str, scratch: Path, before: dict[Path, set[str]], mounts: list[str] | None = None) -> list[str]:
    own = {os.getpid(), *helper_pids()}
    others = [pid for pid in marked_processes(mark) if pid not in own]
    found = [f"process {pid}: {command_line(pid)}" for pid in others]
    found += [f"process {pid} listens on port {port}" for pid in (*own, *others) for port in listening_ports(pid)]
    kept = {own_temporary_folder()} | set(scratch.glob("torchinductor_*"))  # torch's cache stays by design
    found += [f"temporary {path}" for path in scratch.iterdir() if path not in kept]
    for folder, known in before.items():
        new = {folder / name for name in entries(folder) - known}
        found += [f"new {path}" for path in sorted(new) if not used_by_strangers(path, mark)]
    found += [f"process {pid} holds {namespace}" for pid in own for namespace in held_namespaces(pid)]
    found += [f"link {name}" for name in emulation_links()]
    found += [f"mount on {target}" for target in emulation_mounts()[len(mounts or emulation_mounts()) :]]
    return found


def held_namespaces(pid: int) -> list[str]:
    """Namespaces that would live on because a process has them open; those it lives in are found with it."""
    return [name for name in descriptor_targets(pid) if re.match(r"(net|mnt|uts|pid|ipc|user):\[", name)]


def emulation_links(folder: Path = Path("/sys/class/net")) -> list[str]:
    """Bridges and ports of emulated clusters that strayed into this network namespace."""
    return sorted(name for name in entries(folder) if re.fullmatch(r"bridge|port\d+", name))


def emulation_mounts(table: Path = Path("/proc/self/mountinfo")) -> list[str]:
    """Where emulated hosts mount something, as often as something is mounted there in this namespace."""
    targets = [line.split()[4] for line in read_quietly(table).decode().splitlines()]
    return sorted(target for target in targets if target in ("/dev/shm", "/etc/hosts", "/proc"))


def helper_pids() -> set[int]:
    """multiprocessing's own servants of this process, which live as long as it does."""
    known = (forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid)
    return {pid for pid in known if pid is not None}


def own_temporary_folder() -> Path | None:
    """Where the fork server of this process keeps its socket."""
    folder = multiprocessing.current_process()._config.get("tempdir")
    return Path(folder) if folder else None


def entries(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def living_pids() -> list[int]:
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if is_alive(pid)]


def is_alive(pid: int) -> bool:
    status = read_quietly(Path(f"/proc/{pid}/stat")).rpartition(b")")[2].split()
    return bool(status) and status[0] != b"Z"


def marked_processes(mark: str) -> list[int]:
    """Living processes that carry the mark, whoever their parent is by now. This one is not marked: it was exec'd
    before."""
    text = f"{MARK}={mark}".encode()
    return [pid for pid in living_pids() if text in read_quietly(Path(f"/proc/{pid}/environ")).split(b"\0")]


def command_line(pid: int) -> str:
    return read_quietly(Path(f"/proc/{pid}/cmdline")).replace(b"\0", b" ").decode(errors="replace").strip()


def listening_ports(pid: int) -> list[int]:
    """TCP ports on which a process listens; in a namespace of its own these are that namespace's."""
    open_files = set(descriptor_targets(pid))
    ports = []
    for table in ("tcp", "tcp6"):
        for line in read_quietly(Path(f"/proc/{pid}/net/{table}")).decode().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in open_files:
                ports.append(int(fields[1].rpartition(":")[2], 16))
    return ports


def descriptor_targets(pid: int) -> Iterator[str]:
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return
    for name in names:
        try:
            yield os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError:
            continue


def used_by_strangers(path: Path, mark: str) -> bool:
    """Whether a living process that is not of this session has the file open or mapped."""
    ours = {os.getpid(), *marked_processes(mark)}
    return any(uses(pid, path) for pid in living_pids() if pid not in ours)


def uses(pid: int, path: Path) -> bool:
    if any(target.startswith(str(path)) for target in descriptor_targets(pid)):
        return True
    return str(path).encode() in read_quietly(Path(f"/proc/{pid}/maps"))


def read_quietly(path: Path) -> bytes:
    """A file of /proc, or nothing if its process has just ended."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def wait_until(condition: Callable[[], object], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s in vain: {what}"
        time.sleep(0.02)


@contextmanager
def killed_at_end(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """A test that fails leaves nothing running."""
    with process:
        try:
            yield process
        finally:
            process.kill()


def session_members(session: int) -> list[int]:
    """Living processes of a session, that is, of one started with start_new_session."""
    return [pid for pid in living_pids() if session_of(pid) == session]


def session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return -1


def any_alive(pids: Iterable[int]) -> bool:
    return any(is_alive(pid) for pid in pids)
