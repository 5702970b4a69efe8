"""The system calls of emulated hosts: namespaces and mounts. Linux only; nothing here outlives its process."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

NEW_MOUNTS = 0x00020000
NEW_UTS = 0x04000000
NEW_IPC = 0x08000000
NEW_USER = 0x10000000
NEW_PID = 0x20000000
NEW_NET = 0x40000000

_MS_BIND = 4096
_MS_REC = 16384
_MS_PRIVATE = 1 << 18
_PR_SET_CHILD_SUBREAPER = 36
_CAPABILITY_VERSION = 0x20080522
_CAP_NET_ADMIN = 12
_CAP_SYS_ADMIN = 21


def unshare(flags: int) -> None:
    _call("unshare", flags)


def enter_network(descriptor: int) -> None:
    """This thread into the network namespace of the descriptor; sockets stay where they were made."""
    _call("setns", descriptor, NEW_NET)


def adopt_orphans() -> None:
    """Children of children that lost their parent become ours to wait for."""
    _call("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def is_privileged() -> bool:
    """Whether namespaces can be made and links shaped without a user namespace: usually, whether this is root."""
    status = Path("/proc/self/status").read_text()
    effective = int(status.partition("CapEff:")[2].split()[0], 16)
    return all(effective >> capability & 1 for capability in (_CAP_NET_ADMIN, _CAP_SYS_ADMIN))


def become_privileged() -> None:
    """A user namespace in which this process may do what root may outside; its user and group keep their numbers.

    The privileges end with the next exec, so programs that run on emulated hosts do not have them; a process that is
    forked without one drops them itself.
    """
    user, group = os.geteuid(), os.getegid()
    unshare(NEW_USER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def drop_privileges() -> None:
    """As the next exec would: root keeps them, everybody else has none."""
    if os.geteuid() != 0:
        _call("capset", (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)())


def keep_mounts_private() -> None:
    """What is mounted from now on stays in this mount namespace."""
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)


def mount_fresh(kind: str, target: str) -> None:
    """An empty tmpfs, or a proc of this process's own pid namespace."""
    _mount(kind, target, kind, 0)


def mount_file(source: str, target: str) -> None:
    _mount(source, target, None, _MS_BIND)


def quieten_ipv6() -> None:
    """No IPv6 in this network namespace: its cards would announce themselves on the links all by themselves."""
    for which in ("all", "default"):
        try:
            Path(f"/proc/sys/net/ipv6/conf/{which}/disable_ipv6").write_text("1")
        except OSError:
            return  # a kernel without IPv6, or a container that keeps its settings


def _mount(source: str, target: str, kind: str | None, flags: int) -> None:
    _call("mount", source.encode(), target.encode(), kind and kind.encode(), ctypes.c_ulong(flags), None)


def _call(name: str, *arguments: object) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
