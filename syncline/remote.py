"""Runs at a URL (s3://bucket/path, file:///path): the run works in a folder of this machine, and a thread keeps a
copy of it at the URL, through fsspec.

A checkpoint is copied as soon as it is complete, its checkpoint.json last, so that one without is not taken for a
checkpoint; the rest every half minute and at the end. Whoever reads or resumes a run from a URL fetches it into a
folder of this machine first. Those folders go with the process.
"""

from __future__ import annotations

import atexit
import re
import shutil
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from syncline.errors import RunFolderError, SynclineError
from syncline.training.manifest import NAME, find_checkpoints

COPY_SECONDS = 30.0
_LOOK_SECONDS = 0.5
_URL = re.compile(r"[a-z][a-z0-9+]+://.+")
_CHECKPOINTS = "checkpoints"
_TO_READ = ("events", "logs", "profile")
_urls: dict[Path, str] = {}
"""By folder of this machine."""


def is_url(text: object) -> bool:
    return isinstance(text, str) and _URL.fullmatch(text) is not None


def shown(path: Path) -> str:
    """A run's folder as users know it."""
    return _urls.get(path, str(path))


def new_folder(run_dir: Path | str | None) -> Path | None:
    """Where a new run works. For a URL, a folder of this machine; refused now if nothing can be written there."""
    if not is_url(run_dir):
        return Path(run_dir) if run_dir is not None else None
    remote = Remote(str(run_dir))
    remote.check_new()
    return _folder_for(remote.url)


def _folder_for(url: str) -> Path:
    """It is removed at the end of this process."""
    path = Path(tempfile.mkdtemp(prefix="syncline-run-")) / (url.rstrip("/").rpartition("/")[2] or "run")
    _urls[path] = url
    return path


@atexit.register
def forget() -> None:
    """Remove the folders that stand for a URL."""
    for path in _urls:
        shutil.rmtree(path.parent, ignore_errors=True)
    _urls.clear()


class Remote:
    """A run's folder at a URL. Raises RunFolderError for whatever is wrong with it."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        with self._explained("open"):
            import fsspec

            local = {"auto_mkdir": True} if self.url.startswith("file:") else {}
            self._files, self._root = fsspec.core.url_to_fs(self.url, **local)

    def check_new(self) -> None:
        """Nothing is there, and this process may write there."""
        if self.names():
            raise RunFolderError(
                f"{self.url} is not empty.", action="Choose another --run-dir, or resume that run with --resume."
            )
        with self._explained("write to"):
            self.write(".syncline", b"")
            self.remove(".syncline")

    def names(self) -> list[str]:
        """Of all files."""
        with self._explained("read"):
            self._files.invalidate_cache()
            try:
                found = self._files.find(self._root)
            except FileNotFoundError:
                return []
        names = [PurePosixPath(name).relative_to(PurePosixPath(self._root)) for name in found]
        return [str(name) for name in names if ".." not in name.parts]  # others may have written there, too

    def read(self, name: str) -> bytes:
        with self._explained("read"):
            return bytes(self._files.cat_file(f"{self._root}/{name}"))

    def write(self, name: str, content: bytes) -> None:
        self._files.pipe_file(f"{self._root}/{name}", content)

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._files.rm_file(f"{self._root}/{name}")

    @contextmanager
    def _explained(self, act: str) -> Iterator[None]:
        try:
            yield
        except SynclineError:
            raise
        except ImportError as error:
            extra = "Install Syncline with its extra: pip install 'syncline[s3]', or '.[s3]' in a clone."
            action = extra if self.url.startswith("s3:") else "Install that package beside Syncline."
            raise RunFolderError(f"cannot {act} {self.url}: {_words(error)}.", action=action) from None
        except Exception as error:  # each kind of storage has errors of its own
            raise RunFolderError(f"cannot {act} {self.url}: {_words(error)}.") from None


def fetched(url: str, *, checkpoints: bool = False) -> Path:
    """A copy of the run at a URL, in a folder of this machine. An incomplete checkpoint is left out."""
    remote = Remote(url)
    names = remote.names()
    if "run.json" not in names:
        raise RunFolderError(f"{url} is not a run folder.", action="Give the URL that a run was written to.")
    folder, there = _folder_for(remote.url), set(names)
    for name in names:
        parts = name.split("/")
        whole = checkpoints and parts[0] == _CHECKPOINTS and "/".join([*parts[:2], NAME]) in there
        if len(parts) == 1 or parts[0] in _TO_READ or whole:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(remote.read(name))
    return folder


@contextmanager
def copied(path: Path | None) -> Iterator[None]:
    """While the block lasts, and once more at its end, what is new in a folder that stands for a URL is copied there.
    Other folders stay as they are."""
    if path is None or path not in _urls:
        yield
        return
    copier = _Copier(path, Remote(_urls[path]))
    try:
        yield
    except BaseException:
        try:
            copier.close()
        except SynclineError as error:  # what made the run fail is what must be heard
            warnings.warn(str(error), stacklevel=2)
        raise
    copier.close()


class _Copier:
    def __init__(self, path: Path, remote: Remote) -> None:
        self._path = path
        self._remote = remote
        self._sent = dict(self._found())
        self._gone_wrong = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="syncline-copy", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        try:
            self._thread.join()
            self._copy()
        except BaseException as error:  # Ctrl-C, too: this is the only whole copy
            _urls.pop(self._path, None)  # so that it stays
            why = _words(error) if isinstance(error, Exception) else "it was interrupted"
            raise SynclineError(
                f"cannot copy the run to {self._remote.url}: {why}.", action=f"It is kept in {self._path}."
            ) from None

    def _watch(self) -> None:
        newest, waited = max(find_checkpoints(self._path / _CHECKPOINTS), default=0), COPY_SECONDS
        while not self._ended.wait(_LOOK_SECONDS):
            waited += _LOOK_SECONDS
            step = max(find_checkpoints(self._path / _CHECKPOINTS), default=0)
            if step > newest or (waited >= COPY_SECONDS and self._path.exists()):
                newest, waited = step, 0.0
                self._try_to_copy()

    def _try_to_copy(self) -> None:
        try:
            self._copy()
        except Exception as error:  # the next time may go better
            if not self._gone_wrong:
                warnings.warn(f"cannot copy the run to {self._remote.url} now: {_words(error)}", stacklevel=2)
            self._gone_wrong = True

    def _copy(self) -> None:
        """What is new, then without what is gone: an old checkpoint goes when a newer one is complete there."""
        found, gone = dict(self._found()), set[str]()
        for name in sorted(found, key=_turn):
            above = name.rpartition("/")[0]
            if found[name] == self._sent.get(name) or above in gone:
                continue
            try:
                content = (self._path / name).read_bytes()
            except FileNotFoundError:
                gone.add(above)  # a newer checkpoint has taken its place meanwhile
                continue
            self._remote.write(name, content)
            self._sent[name] = found[name]
        has_checkpoint = any(name.endswith(NAME) for name in self._sent.keys() & found.keys())
        for name in sorted(self._sent.keys() - found.keys(), key=_turn, reverse=True):
            if has_checkpoint or not found or not name.startswith(_CHECKPOINTS):
                self._remote.remove(name)
                del self._sent[name]

    def _found(self) -> Iterator[tuple[str, tuple[int, int]]]:
        for path in sorted(self._path.rglob("*")) if self._path.exists() else ():
            name = path.relative_to(self._path)
            with suppress(FileNotFoundError):
                if path.is_file() and not any(part.startswith(".") for part in name.parts):
                    status = path.stat()
                    yield name.as_posix(), (status.st_size, status.st_mtime_ns)


def _turn(name: str) -> tuple[bool, str, bool]:
    """Checkpoints last, each with its checkpoint.json at its end."""
    above, _, last = name.rpartition("/")
    return name.startswith(_CHECKPOINTS), above, last == NAME


def _words(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    said = lines[0].rstrip(".") if lines else ""
    if isinstance(error, FileNotFoundError):
        return f"it is not there ({said})"
    return said or type(error).__name__
