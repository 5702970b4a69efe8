"""The check for leftovers finds what is planted: a check that finds nothing in a dirty house is worth nothing."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import conftest
import pytest

from syncline.launcher.here import run_ranks

OWN = f"planted by {os.getpid()}"
"""The mark of what these tests plant: the same test may run in another worker at the same time."""

ORPHAN = """
import subprocess, sys
child = [sys.executable, "-c", "import time; time.sleep(60)"]
print(subprocess.Popen(child, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid)
"""

DIRTY_SESSION = """
import os, pathlib, subprocess
import conftest, pytest
conftest.SETTLE_SECONDS = 0.5
@pytest.fixture(scope="module")
def shared(): pathlib.Path(f"shared-{os.getpid()}").touch()
@pytest.mark.parametrize("number", range(4))
def test_clean(shared, number): pass
def test_dirty(): subprocess.Popen(["sleep", "60"])
"""


def found(scratch: Path, *folders: Path, mark: str = OWN) -> list[str]:
    """What is new since the folders were empty."""
    return conftest.leftovers(mark, scratch, {folder: set() for folder in folders})


@contextmanager
def sleeping(mark: str, code: str = "import time; print(0, flush=True); time.sleep(60)") -> Iterator[int]:
    environment = {**os.environ, conftest.MARK: mark}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process.pid
        finally:
            process.kill()


def test_clean_house_has_no_leftovers(tmp_path: Path) -> None:
    assert found(tmp_path) == []


def test_child_is_found_until_it_ends(tmp_path: Path) -> None:
    with sleeping(OWN) as pid:
        assert [line for line in found(tmp_path) if f"process {pid}" in line]
        with pytest.raises(AssertionError, match=f"process {pid}"):
            conftest.wait_for_none(lambda: found(tmp_path), 0.2)
    assert found(tmp_path) == []


def test_process_of_another_session_is_not_ours(tmp_path: Path) -> None:
    with sleeping("somebody else"):
        assert found(tmp_path) == []


def test_orphan_is_found(tmp_path: Path) -> None:
    environment = {**os.environ, conftest.MARK: OWN}
    done = subprocess.run([sys.executable, "-c", ORPHAN], env=environment, capture_output=True, text=True, check=True)
    pid = int(done.stdout)
    try:
        assert [line for line in found(tmp_path) if f"process {pid}" in line]
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, 9)


def test_listening_socket_is_found_in_this_process_and_in_others(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert f"process {os.getpid()} listens on port {port}" in found(tmp_path)
    code = (
        "import socket, time; server = socket.create_server(('::1', 0), family=socket.AF_INET6);"
        "print(0, flush=True); time.sleep(60)"
    )
    with sleeping(OWN, code) as pid:
        assert [line for line in found(tmp_path) if f"process {pid} listens on port" in line]


def test_temporary_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "pymp-planted").mkdir()
    assert found(tmp_path) == [f"temporary {tmp_path / 'pymp-planted'}"]


@pytest.mark.parametrize("name", ["psm_planted", "sem.mp-planted"])
def test_new_entry_of_a_shared_folder_is_found_unless_a_stranger_uses_it(tmp_path: Path, name: str) -> None:
    scratch, shared = tmp_path / "scratch", tmp_path / "shm"
    scratch.mkdir()
    shared.mkdir()
    planted = shared / name
    planted.write_bytes(bytes(4096))
    assert found(scratch, shared) == [f"new {planted}"]
    code = f"import time; file = open({str(planted)!r}); print(0, flush=True); time.sleep(60)"
    with sleeping("somebody else", code):
        assert found(scratch, shared) == []
    closed = f"import mmap, time; file = open({str(planted)!r}, 'r+b'); m = mmap.mmap(file.fileno(), 0); file.close()"
    with sleeping("somebody else", f"{closed}; print(0, flush=True); time.sleep(60)"):
        assert found(scratch, shared) == []
    with sleeping(OWN, code):
        assert f"new {planted}" in found(scratch, shared)


KILLED = """
import multiprocessing, os, signal
from multiprocessing import resource_tracker
semaphore = multiprocessing.get_context("spawn").Semaphore()
print(semaphore._semlock.name, flush=True)
os.kill(resource_tracker._resource_tracker._pid, signal.SIGKILL)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_semaphore_of_a_process_that_was_killed_with_its_tracker_is_found(tmp_path: Path) -> None:
    folder = Path("/dev/shm")
    before = {folder: conftest.entries(folder)}
    done = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True)
    left = folder / f"sem.{done.stdout.strip().removeprefix('/')}"
    try:
        assert f"new {left}" in conftest.leftovers(OWN, tmp_path, before)
    finally:
        left.unlink()


def test_namespace_that_is_held_open_is_found(tmp_path: Path) -> None:
    with open("/proc/self/ns/net"):
        assert [line for line in found(tmp_path) if f"process {os.getpid()} holds net:[" in line]
    assert found(tmp_path) == []


def test_links_and_mounts_of_emulated_hosts_are_found(tmp_path: Path) -> None:
    for name in ("bridge", "port12", "eth0", "br-1f", "report1"):
        (tmp_path / name).mkdir()
    assert conftest.emulation_links(tmp_path) == ["bridge", "port12"]
    table = tmp_path / "mountinfo"
    table.write_text(
        "1 2 0:3 / / rw - ext4 a rw\n5 2 0:4 / /dev/shm rw - tmpfs a rw\n6 2 0:5 / /dev/shm rw - tmpfs a rw\n"
    )
    assert conftest.emulation_mounts(table) == ["/dev/shm", "/dev/shm"]
    left = conftest.leftovers(OWN, tmp_path / "eth0", {}, conftest.emulation_mounts()[1:])
    assert [line for line in left if line.startswith("mount on ")]


def test_fork_server_of_this_process_is_no_leftover(tmp_path: Path) -> None:
    run_ranks(os.getpid, workers=1, log_dir=None)
    mark = os.environ[conftest.MARK]
    assert conftest.helper_pids() <= set(conftest.marked_processes(mark))
    left = conftest.leftovers(mark, tmp_path, {})
    assert not [line for line in left for pid in conftest.helper_pids() if f"process {pid}" in line]


def test_dirty_worker_fails_and_the_one_beside_it_does_not(tmp_path: Path) -> None:
    (tmp_path / "test_session.py").write_text(DIRTY_SESSION)
    environment = {**os.environ, "PYTHONPATH": str(Path(conftest.__file__).parent)}
    side_by_side = ["-n", "2", "--dist", "loadgroup", "-p", "conftest", "-o", "markers=processes"]
    command = [sys.executable, "-m", "pytest", "-q", *side_by_side, "."]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    (pid,) = re.findall(r"left behind:\nE +process (\d+): sleep 60", done.stdout)
    os.kill(int(pid), 9)
    assert done.returncode == 1
    assert "5 passed, 1 error" in done.stdout
    assert len(list(tmp_path.glob("shared-*"))) == 1, "tests that share a fixture must run in one worker"
