"""The switch of an emulated cluster: a process that holds the bridge in a network namespace of its own.

It starts the hosts, joins them, and then cuts, restores and reshapes links when the launcher asks for it. It ends
with the launcher, and with it go bridge and links; no namespace has a name that could stay behind.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import os
import select
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any

from syncline.launcher.emulation import namespaces as ns
from syncline.launcher.emulation.host import SHARED_MEMORY, Keeper, furnish
from syncline.launcher.emulation.network import Network
from syncline.launcher.wire import receive_frame, send_frame

_END_SECONDS = 5.0
_HOST = ns.NEW_NET | ns.NEW_UTS | ns.NEW_IPC | ns.NEW_MOUNTS | ns.NEW_PID
_ALLOW = (
    "Run as root; or allow user namespaces (sysctl user.max_user_namespaces=10000; on Debian "
    "kernel.unprivileged_userns_clone=1, on Ubuntu kernel.apparmor_restrict_unprivileged_userns=0); in a container, "
    "start it with --privileged."
)
_LOAD = "Load the kernel modules: modprobe -a bridge veth sch_tbf."


class Refused(Exception):
    """What the machine does not allow, and what to do about it."""

    def __init__(self, what: str, action: str) -> None:
        super().__init__(what)
        self.what = what
        self.action = action


def main(arguments: list[str]) -> None:
    """`N control host0 … rate0 … module …`: the number of hosts, descriptors of connections to the launcher, bits per
    second, and modules that every host starts with."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    launcher = os.pidfd_open(os.getppid())
    num_hosts = int(arguments.pop(0))
    control, *hosts = (socket.socket(fileno=int(text)) for text in arguments[: 1 + num_hosts])
    rates = [float(text) for text in arguments[1 + num_hosts : 1 + 2 * num_hosts]]
    children: list[int] = []
    try:
        with _step("cannot create a network namespace", _ALLOW):
            ns.adopt_orphans()
            if not ns.is_privileged():
                ns.become_privileged()  # before modules start threads, with which it is refused
            ns.unshare(ns.NEW_NET | ns.NEW_MOUNTS)
            ns.keep_mounts_private()
            ns.mount_fresh("tmpfs", SHARED_MEMORY)
        _preload(arguments[1 + 2 * num_hosts :])
        _set_up(control, hosts, rates, launcher, children)
    except Refused as refusal:
        with contextlib.suppress(OSError):
            send_frame(control, {"refused": refusal.what, "action": refusal.action})
    finally:
        control.close()
        _wait_for(children)


def _preload(modules: list[str]) -> None:
    """Hosts are forked from this process, and what they run in Python from them: nobody loads these again."""
    os.environ["TMPDIR"] = SHARED_MEMORY  # torch makes a folder there, which so ends with this process
    for module in modules:
        with contextlib.suppress(ImportError):  # whoever needs it will say so
            importlib.import_module(module)
    gc.freeze()  # or the first collection of each copy would touch, and so copy, every page


def _set_up(
    control: socket.socket, hosts: list[socket.socket], rates: list[float], launcher: int, children: list[int]
) -> None:
    for number, connection in enumerate(hosts):
        inherited = [control, *hosts[number + 1 :]]
        children.append(_start_host(number, len(hosts), connection, inherited, launcher))
        connection.close()
    with _step("cannot connect the emulated hosts", _LOAD):
        namespaces = [os.open(f"/proc/{child}/ns/net", os.O_RDONLY) for child in children]
        # Only now: the hosts' first processes do without it.
        from pyroute2.netlink.exceptions import NetlinkError  # type: ignore[import-untyped]

        try:
            network = Network(namespaces, rates)
        except NetlinkError as error:
            raise OSError(error.code, f"{error}") from error
        for namespace in namespaces:
            os.close(namespace)
    send_frame(control, {})
    _serve(control, network, launcher)


@contextlib.contextmanager
def _step(what: str, action: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Refused(f"{what}: {os.strerror(error.errno) if error.errno else error}.", action) from error
    except ImportError as error:
        raise Refused(f"{what}: {error}.", "Install pyroute2.") from error


def _serve(control: socket.socket, network: Network, launcher: int) -> None:
    poll = select.poll()
    for descriptor in (control.fileno(), launcher):
        poll.register(descriptor, select.POLLIN)
    while launcher not in {descriptor for descriptor, _ in poll.poll()}:
        request = receive_frame(control)
        if request is None:
            return
        send_frame(control, _obey(network, request.message))


def _obey(network: Network, request: dict[str, Any]) -> Mapping[str, int]:
    host = request["host"]
    if request["do"] == "connect":
        network.set_connected(host, request["connected"])
    elif request["do"] == "rate":
        network.set_rate(host, request["bits_per_s"])
    elif request["do"] == "counters":
        return network.counters(host)
    return {}


def _start_host(
    number: int, num_hosts: int, connection: socket.socket, inherited: list[socket.socket], launcher: int
) -> int:
    """The host's first process, by pid. One in between makes the pid namespace, which only its children enter."""
    switch = os.pidfd_open(os.getpid())
    reading, writing = os.pipe()
    parent = os.fork()
    if parent == 0:
        for unneeded in inherited:
            unneeded.close()
        os.close(reading)
        _become_host(number, num_hosts, connection, [launcher, switch], writing)
    os.close(switch)
    os.close(writing)
    with open(reading) as report:
        lines = dict(line.split(" ", 1) for line in report.read().splitlines())
    os.waitpid(parent, 0)
    if "ready" in lines:
        return int(lines["pid"])
    error = int(lines.get("error", errno.EIO))
    hint = (
        "" if "pid" not in lines else " A container must allow mounting /proc: --security-opt systempaths=unconfined."
    )
    raise Refused(f"cannot create an emulated host: {os.strerror(error)}.", _ALLOW + hint)


def _become_host(number: int, num_hosts: int, connection: socket.socket, watched: list[int], report: int) -> None:
    """Never returns. Tells 'pid N' from outside and 'ready …' or 'error N' from inside the host."""
    code = 1
    try:
        ns.unshare(_HOST)
        first = os.fork()
        if first != 0:
            os.write(report, f"pid {first}\n".encode())
            os._exit(0)
        furnish(number, num_hosts)
        os.write(report, b"ready yes\n")
        os.close(report)
        Keeper(number, connection, watched).run()
        code = 0
    except OSError as error:
        with contextlib.suppress(OSError):
            os.write(report, f"error {error.errno}\n".encode())
    finally:
        os._exit(code)


def _wait_for(children: list[int]) -> None:
    """The kernel ends a host's processes before it lets the first one go, so after this nothing of them is left."""
    end = time.monotonic() + _END_SECONDS
    while children and time.monotonic() < end:
        children = [child for child in children if not _has_ended(child)]
        time.sleep(0.005)


def _has_ended(child: int) -> bool:
    try:
        return os.waitpid(child, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return True
