"""Emulated hosts: a cluster on one Linux machine, with a real TCP stack between its hosts.

Read `cluster.py` first: what the launcher does with it. `switch.py` is the process that joins the hosts, `host.py`
the first process of a host, `network.py` the links, `namespaces.py` the system calls.
"""

from __future__ import annotations

from syncline.launcher.emulation.cluster import EmulatedCluster
from syncline.launcher.emulation.process import HostProcess

__all__ = ["EmulatedCluster", "HostProcess"]
