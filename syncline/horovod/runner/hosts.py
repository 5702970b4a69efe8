"""The hosts that a user names for horovodrun: `-H`, `--hostfile`, `--host-discovery-script`.

Syncline starts ranks on this machine only, so every name must be one of this machine's.
"""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

from syncline.errors import UsageError

_DISCOVERY_SECONDS = 30
_ELSEWHERE = (
    "Start one rank or one launcher on each host yourself, with mpirun, srun or torchrun --nnodes: "
    "hvd.init() finds its place under each of them."
)


def slots_of(hosts: str) -> int:
    """'localhost:2,127.0.0.1:2' -> 4."""
    return sum(_slots(entry, 1) for entry in hosts.split(",") if entry.strip())


def slots_of_file(path: Path) -> int:
    """Lines of a host file: 'localhost slots=4'."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise UsageError(f"cannot read the host file {path}: {error.strerror}.") from None
    wanted = [line.partition("#")[0].strip() for line in lines]
    return sum(_slots(re.sub(r"\s+slots\s*=\s*", ":", line), 1) for line in wanted if line)


def discovery(script: str, slots: int | None) -> Callable[[], int]:
    """A function that asks the user's script how many ranks fit now. It prints `host:slots`, a line for each host."""
    program = shutil.which(script) or str(Path(script).resolve())

    def ask() -> int:
        try:
            done = subprocess.run([program], capture_output=True, text=True, timeout=_DISCOVERY_SECONDS, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            raise UsageError(f"the host discovery script {script} failed: {error}") from None
        return _sum_of_lines(done.stdout.splitlines(), slots)

    return ask


def _sum_of_lines(lines: Iterable[str], slots: int | None) -> int:
    return sum(_slots(line.strip(), slots) for line in lines if line.strip())


def _slots(entry: str, default: int | None) -> int:
    match = re.fullmatch(r"([^\s:]+|\[[^\]]+\])(?::(\d+))?", entry.strip())
    if match is None or (match[2] is None and default is None):
        raise UsageError(f"cannot read the host {entry!r}.", action="Write it as NAME:SLOTS, e.g. localhost:4.")
    if not is_this_machine(match[1].strip("[]")):
        raise UsageError(f"host {match[1]} is not this machine, and horovodrun starts ranks here.", action=_ELSEWHERE)
    return int(match[2]) if match[2] else default or 0


def is_this_machine(name: str) -> bool:
    """Whether an address of that name is one of ours: only those can be bound to."""
    if name in ("localhost", socket.gethostname()):
        return True
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, _, _, address in found:
        with socket.socket(family, kind) as candidate:
            try:
                candidate.bind(address)
            except OSError:
                continue
            return True
    return False
