"""Core time that went to others."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from syncline.comm.threads import run_threads
from syncline.launcher.emulation import EmulatedCluster
from syncline.machine import busy_seconds
from syncline.measure.load import LoadMeter, machine_number, other_share, own_seconds

pytestmark = pytest.mark.xdist_group("measures")


def test_what_ranks_did_not_use_is_others() -> None:
    # Two ranks on one host of 2 cores, 10 s: 15 core seconds busy, 8 of them the ranks' own.
    assert other_share([[0, 5.0, 15.0, 20.0], [0, 3.0, 14.9, 20.0]]) == 7.0 / 20.0
    assert other_share([[0, 8.0, 7.9, 20.0]]) == 0.0, "clocks of the system tick coarsely"


def test_the_busiest_host_counts() -> None:
    assert other_share([[0, 5.0, 5.0, 10.0], [1, 5.0, 9.0, 10.0]]) == 0.4


def test_a_system_that_does_not_tell() -> None:
    assert other_share([[0, 5.0, -1.0, 10.0]]) is None
    assert other_share([]) is None


def test_work_of_grandchildren_is_counted_as_own() -> None:
    """A Spark's tasks are children of a child of its."""
    busy = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {busy!r}])"
    before = own_seconds()
    with subprocess.Popen([sys.executable, "-c", outer], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()  # both live
        assert own_seconds() - before >= 0.25
        child.communicate(b"\n")


def test_own_work_is_counted_as_own() -> None:
    before, busy = own_seconds(), busy_seconds()
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    assert own_seconds() - before >= 0.15
    assert busy is None or (busy_seconds() or 0) > busy


def test_emulated_hosts_are_one_machine() -> None:
    code = "from syncline.measure.load import machine_number; print(machine_number())"
    with EmulatedCluster(2, [1e9, 1e9]) as cluster:
        process = cluster.popen(1, [sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert process.stdout is not None
        there = float(process.stdout.read())
        process.wait(60)
        process.close()
    assert there == machine_number()


def test_all_ranks_learn_the_same_share() -> None:
    shares = run_threads(2, lambda communicator: LoadMeter().others(communicator))
    assert shares[0] == shares[1]
