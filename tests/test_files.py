"""Files that are whole or absent, and locks that go with their process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from syncline.files import locked, replacing, write_atomic


@pytest.mark.parametrize("durable", [True, False])
def test_a_file_is_replaced_at_the_end_only(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "file"
    write_atomic(path, "old", durable=durable)
    with replacing(path, durable=durable) as file:
        file.write(b"new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_interrupted_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old")

    def interrupted() -> None:
        with replacing(path) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_lock_refuses_or_waits_until_its_process_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    code = "import pathlib, sys, syncline.files as files\n"
    code += "with files.locked(pathlib.Path(sys.argv[1])): print(flush=True); input()"
    command, waits = [sys.executable, "-c", code, str(path)], []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(BlockingIOError), locked(path):
            pytest.fail("two hold the lock")

        def end_holder() -> None:
            holder.kill()
            holder.wait()
            waits.append("once")

        with locked(path, while_waiting=end_holder):
            assert waits == ["once"]
