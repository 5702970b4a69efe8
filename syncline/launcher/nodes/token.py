"""The run's token: where a node has it from, and how node 0 hands it on.

Whoever knows the token is a node of the run. It comes from --token-file or SYNCLINE_TOKEN; otherwise node 0 makes
one, prints it, and leaves it in a file that only the user can read, in the folder of runs: nodes that share that
folder find it there. Without a token, a node can join only from the same machine, as the same user.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from syncline.errors import UsageError

VARIABLE = "SYNCLINE_TOKEN"
_SHORTEST, _LONGEST = 16, 1000


@dataclass(frozen=True)
class Credential:
    """A token and where it is from, in words; an empty token is none."""

    token: str = field(default="", repr=False)
    source: str = ""
    may_change: bool = False
    """It was looked for in a shared folder, which may be late with it."""


@dataclass(frozen=True)
class Tokens:
    """Where a node looks for the token of the run that meets at `rendezvous`: what whoever started all nodes gave to
    it, the user's file, SYNCLINE_TOKEN, and the folder that it may share with node 0."""

    rendezvous: str
    file: Path | None = None
    folder: Path | None = None
    token: str = field(default="", repr=False)

    def given(self) -> Credential | None:
        """What this node was given; a UsageError if that is no token, or others may know it."""
        if self.token:
            return Credential(self.token, "the launcher")
        if self.file is not None:
            return Credential(_from_user(self.file), f"the file {self.file}")
        if VARIABLE in os.environ:
            return Credential(_checked(os.environ[VARIABLE], VARIABLE), VARIABLE)
        return None

    def found(self) -> Credential:
        """What this node was given, or what node 0 has left in the folder."""
        credential = self.given()
        if credential is not None or self.folder is None:
            return credential or Credential()
        path, text = self._left_by_node_0(self.folder), None
        with contextlib.suppress(OSError):
            text = _read_private(path)
        return Credential((text or "").strip(), f"the file {path}", may_change=True)

    @contextlib.contextmanager
    def offered(self, say: Callable[[str], None], *, is_local: bool) -> Iterator[Credential]:
        """For node 0, which listens already: the token. A new one is handed on for as long as the block lasts, unless
        the run `is_local`: nodes of this machine need none."""
        credential = self.given()
        with contextlib.ExitStack() as stack:
            if credential is None:
                credential = Credential(secrets.token_hex(16), "node 0")
                if not is_local:
                    say(stack.enter_context(self._handed_on(credential.token)))
            yield credential

    @contextlib.contextmanager
    def _handed_on(self, token: str) -> Iterator[str]:
        """What to tell the user."""
        words = f"token {token}: give it to the other nodes as {VARIABLE}, or in a file with --token-file"
        if self.folder is None:
            yield words
            return
        with _left(self._left_by_node_0(self.folder), token) as path:
            yield words if path is None else f"{words}; those that see {path} find it there"

    def _left_by_node_0(self, folder: Path) -> Path:
        return folder / f".token-{re.sub(r'[^A-Za-z0-9.-]', '_', self.rendezvous)}"


def _from_user(path: Path) -> str:
    try:
        text = _read_private(path)
    except OSError as error:
        raise UsageError(f"cannot read the token file {path}: {error.strerror}.") from None
    if text is None:
        raise UsageError(
            f"others can read the token file {path}, or it is no file of yours.", action=f"Try: chmod 600 {path}"
        )
    return _checked(text, f"the token file {path}")


def _checked(text: str, where: str) -> str:
    token = text.strip()
    if not _SHORTEST <= len(token) <= _LONGEST or not token.isprintable() or not token.isascii():
        raise UsageError(
            f"{where} holds no token: that is {_SHORTEST} characters or more, on one line.",
            action="Take what node 0 prints, or make one with: openssl rand -hex 16",
        )
    return token


def _read_private(path: Path) -> str | None:
    """The file's text; None if another user could have read or written it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, errors="replace") as file:
        about = os.fstat(descriptor)
        is_ours = about.st_uid == os.geteuid() and not about.st_mode & 0o077 and stat.S_ISREG(about.st_mode)
        return file.read(2 * _LONGEST) if is_ours else None


@contextlib.contextmanager
def _left(path: Path, token: str) -> Iterator[Path | None]:
    """The token in a file; None where no file can be kept from others. It goes with the run."""
    made = not path.parent.exists()
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    is_there = False
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.unlink(missing_ok=True)
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
            file.write(token)
        is_there = _read_private(aside) == token
        if is_there:
            aside.replace(path)
    try:
        yield path.absolute() if is_there else None
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
            if is_there and _read_private(path) == token:
                path.unlink()
            if made:
                path.parent.rmdir()
