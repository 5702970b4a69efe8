"""Emulated hosts: a cluster on one Linux machine, with a real TCP stack between its hosts.

Read `emulated_cluster.py` first: what the launcher does with it. `switch.py` is the process that makes and joins the
hosts, `host.py` the first process of a host, `network.py` the links, `namespaces.py` the system calls.
"""

from __future__ import annotations

from syncline.launcher.emulation.emulated_cluster import EmulatedCluster
from syncline.launcher.emulation.host_process import HostProcess
from syncline.launcher.emulation.network import parse_links

__all__ = ["EmulatedCluster", "HostProcess", "parse_links"]
