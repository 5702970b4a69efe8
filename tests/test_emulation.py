"""Emulated hosts: apart from each other except for the link; shaped, cut, restored; and gone with their launcher."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import emulation_programs
import pytest
from conftest import MARK, killed_at_end, living_pids, marked_processes, read_quietly, wait_until

from syncline.errors import HostError, RankFailed, SynclineError, UsageError
from syncline.launcher.emulation import EmulatedCluster, HostProcess
from syncline.launcher.emulation.network import host_address, parse_links, shape_of
from syncline.launcher.here import run_ranks
from syncline.resolve import choose_method

pytestmark = pytest.mark.xdist_group("measures")

PROGRAM = [sys.executable, emulation_programs.__file__]
MEGABYTE = 1_000_000


@pytest.fixture(scope="module")
def cluster() -> Iterator[EmulatedCluster]:
    with EmulatedCluster(3, [1e9, 1e9, 1e9]) as three_hosts:
        yield three_hosts


def said(cluster: EmulatedCluster, host: int, *command: str) -> str:
    process = cluster.popen(host, command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    text = process.stdout.read().decode().strip()
    assert process.wait(60) == 0, text
    process.close()
    return text


def transfer(cluster: EmulatedCluster, source: int, target: int, count: int) -> tuple[int, float]:
    """Bytes that arrived, and the seconds it took."""
    receiver = cluster.popen(target, [*PROGRAM, "receive", str(count)], stdout=subprocess.PIPE)
    assert receiver.stdout is not None
    assert receiver.stdout.readline() == b"listening\n"
    assert cluster.popen(source, [*PROGRAM, "send", cluster.address(target), str(count)]).wait(60) == 0
    received, seconds = receiver.stdout.read().split()
    assert receiver.wait(60) == 0
    receiver.close()
    return int(received), float(seconds)


def test_each_host_has_its_own_name_address_and_processes(cluster: EmulatedCluster) -> None:
    shell = "uname -n; cat /proc/net/fib_trie | grep -o '10\\.0\\.0\\.[1-9]*$' | sort -u; echo /proc/[0-9]*"
    for host in range(3):
        name, address, *processes = said(cluster, host, "sh", "-c", shell).split()
        assert (name, address) == (f"host{host}", cluster.address(host)) == (cluster.name(host), host_address(host))
        assert "/proc/1" in processes
        assert len(processes) < 10, "a host sees its own processes only"


def test_hosts_find_each_other_by_name(cluster: EmulatedCluster) -> None:
    code = "import socket; print(*(socket.gethostbyname(f'host{n}') for n in range(3)))"
    assert said(cluster, 1, sys.executable, "-c", code).split() == [cluster.address(host) for host in range(3)]


def test_shared_memory_of_one_host_is_not_seen_on_another_nor_outside(cluster: EmulatedCluster) -> None:
    said(cluster, 0, "sh", "-c", "echo secret > /dev/shm/only-on-host0")
    assert "only-on-host0" in said(cluster, 0, "ls", "/dev/shm")
    assert "only-on-host0" not in said(cluster, 1, "ls", "/dev/shm")
    assert not Path("/dev/shm/only-on-host0").exists()


def test_bytes_pass_over_the_links_of_the_two_hosts_and_nowhere_else(cluster: EmulatedCluster) -> None:
    before = [cluster.counters(host) for host in range(3)]
    assert transfer(cluster, 0, 1, MEGABYTE)[0] == MEGABYTE
    after = [cluster.counters(host) for host in range(3)]
    sent = [new["sent_bytes"] - old["sent_bytes"] for new, old in zip(after, before, strict=True)]
    received = [new["received_bytes"] - old["received_bytes"] for new, old in zip(after, before, strict=True)]
    assert MEGABYTE < sent[0] < 1.1 * MEGABYTE, "data and headers"
    assert MEGABYTE < received[1] < 1.1 * MEGABYTE
    assert max(sent[1], received[0], sent[2], received[2]) < 0.1 * MEGABYTE, "answers only"


def test_link_is_no_faster_than_its_rate_in_either_direction() -> None:
    ideal_s = 8 * MEGABYTE / 16e6
    with EmulatedCluster(2, [1e9, 16e6]) as cluster:
        for source, target in ((0, 1), (1, 0)):
            received, seconds = transfer(cluster, source, target, MEGABYTE)
            assert received == MEGABYTE
            assert seconds > 0.9 * ideal_s
        cluster.set_rate(1, 4e6)
        assert transfer(cluster, 0, 1, MEGABYTE // 4)[1] > 0.9 * ideal_s, (
            "a quarter of the bytes at a quarter of the rate"
        )


def test_nothing_passes_a_link_that_is_cut_until_it_is_restored(cluster: EmulatedCluster) -> None:
    receiver = cluster.popen(1, [*PROGRAM, "receive", "1"], stdout=subprocess.PIPE)
    assert receiver.stdout is not None
    receiver.stdout.readline()
    before = cluster.counters(1)
    cluster.cut(1)
    assert cluster.popen(0, [*PROGRAM, "reach", "host1"]).wait(60) == 1
    assert cluster.counters(1)["received_bytes"] == before["received_bytes"]
    cluster.restore(1)
    wait_until(lambda: cluster.popen(0, [*PROGRAM, "reach", "host1"]).wait(60) == 0, 60, "the link comes back")
    receiver.wait(60)
    receiver.close()


def test_programs_end_with_their_exit_code_or_signal(cluster: EmulatedCluster) -> None:
    assert cluster.popen(0, ["sh", "-c", "exit 7"]).wait(60) == 7
    sleeper = cluster.popen(0, ["sleep", "300"])
    assert sleeper.poll() is None
    commands = Path(f"/proc/{sleeper.pid}/cmdline")
    wait_until(lambda: read_quietly(commands) == b"sleep\x00300\x00", 60, "the pid is the one seen from outside")
    with pytest.raises(subprocess.TimeoutExpired):
        sleeper.wait(0.01)
    sleeper.terminate()
    assert sleeper.wait(60) == -signal.SIGTERM
    sleeper.terminate()
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        cluster.popen(0, ["no-such-program"])


def surroundings(word: str) -> dict[str, object]:
    print(sys.stdin.read(), flush=True)
    return {
        "word": word,
        "variables": sorted(os.environ),
        "folder": str(Path.cwd()),
        "name": os.uname().nodename,
        "own group": os.getpgid(0) == os.getpid(),
        "files": sorted(int(name) for name in os.listdir("/proc/self/fd"))[:-1],  # the last one is that folder
    }


def test_function_runs_on_a_host_and_its_result_comes_back(cluster: EmulatedCluster, tmp_path: Path) -> None:
    process = cluster.call(
        2, surroundings, "given", cwd=tmp_path, env={"WORD": "hello"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"typed")
    process.stdin.close()
    assert process.result(20) == {
        "word": "given",
        "variables": ["GLOO_SOCKET_IFNAME", "WORD"],
        "folder": str(tmp_path),
        "name": "host2",
        "own group": True,
        "files": [0, 1, 2, 3],
    }
    assert (process.stdout.read(), process.returncode) == (b"typed\n", 0)
    process.close()


def refuse() -> None:
    raise UsageError("this cannot be.", action="Try that.", rank=3, step=7)


def test_error_of_a_function_comes_back_as_it_was(cluster: EmulatedCluster) -> None:
    process = cluster.call(1, refuse)
    with pytest.raises(UsageError) as told:
        process.result(20)
    assert str(told.value) == "[rank 3 on host host1, step 7] this cannot be. Try that."
    assert process.returncode == UsageError.exit_code
    with pytest.raises(RankFailed, match="failed on host0: ZeroDivisionError: division by zero") as failed:
        cluster.call(0, lambda: 1 / 0).result(20)
    assert "in <lambda>" in failed.value.traceback_text


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda: os._exit(5), "host0 ended with exit code 5 before it returned a result"),
        (lambda: sys.exit(4), "host0 ended with exit code 4"),
        (lambda: signal.raise_signal(signal.SIGKILL), "host0 was killed by SIGKILL"),
        (lambda: signal.raise_signal(signal.SIGTERM), "host0 was killed by SIGTERM"),
    ],
)
def test_function_that_ends_without_a_result_says_how(
    function: Callable[[], object], words: str, cluster: EmulatedCluster
) -> None:
    with pytest.raises(HostError, match=words):
        cluster.call(0, function).result(20)


def test_modules_are_loaded_once_for_all_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a process that does not run on any of them; a module that cannot be loaded is no reason to fail."""
    monkeypatch.delitem(sys.modules, "pyclbr", raising=False)  # another test may have needed it
    with EmulatedCluster(2, [1e9, 1e9], preload=["pyclbr", "no_such_module"]) as cluster:
        processes = [cluster.call(host, lambda: "pyclbr" in sys.modules) for host in range(2)]
        assert [process.result(60) for process in processes] == [True, True]
    assert "pyclbr" not in sys.modules


def loaded_in_ranks(threaded: bool) -> list[bool]:
    if threaded:
        threading.Thread(target=time.sleep, args=(5,), daemon=True).start()
    return run_ranks(lambda: "pyclbr" in sys.modules, workers=2, log_dir=None)


@pytest.mark.parametrize("threaded", [False, True])
def test_ranks_of_a_host_share_what_was_loaded_unless_threads_forbid_a_fork(threaded: bool) -> None:
    with EmulatedCluster(1, [1e9], preload=["syncline.worker", "pyclbr"]) as cluster:
        assert cluster.call(0, loaded_in_ranks, threaded).result(60) == [not threaded] * 2


def test_input_environment_and_folder_reach_the_program(cluster: EmulatedCluster, tmp_path: Path) -> None:
    process = cluster.popen(
        2, ["sh", "-c", "cat; echo $WORD $GLOO_SOCKET_IFNAME; pwd"], cwd=tmp_path,
        env={"WORD": "hello", "PATH": os.environ["PATH"]}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"given\n")
    process.stdin.close()
    assert process.stdout.read().decode().split() == ["given", "hello", cluster.interface, str(tmp_path)]
    assert process.wait(60) == 0
    process.close()


def test_program_outlives_the_thread_that_started_it(cluster: EmulatedCluster) -> None:
    started: list[HostProcess] = []
    thread = threading.Thread(target=lambda: started.append(cluster.popen(0, ["sleep", "300"])))
    thread.start()
    thread.join()
    with pytest.raises(subprocess.TimeoutExpired):
        started[0].wait(0.3)
    started[0].kill()
    assert started[0].wait(60) == -signal.SIGKILL


def test_killing_a_host_ends_all_its_programs_and_no_others(cluster: EmulatedCluster) -> None:
    doomed = [cluster.popen(1, ["sleep", "300"]) for _ in range(2)]
    safe = cluster.popen(0, ["sleep", "300"])
    cluster.kill(1)
    assert [process.wait(60) for process in doomed] == [-signal.SIGKILL] * 2
    assert safe.poll() is None
    safe.kill()
    assert said(cluster, 1, "uname", "-n") == "host1", "a host can start new programs"


def test_two_clusters_with_the_same_addresses_do_not_meet(cluster: EmulatedCluster) -> None:
    with EmulatedCluster(1, [1e9]) as other:
        assert other.address(0) == cluster.address(0)
        lonely = other.popen(0, [*PROGRAM, "receive", "1"], stdout=subprocess.PIPE)
        assert lonely.stdout is not None
        lonely.stdout.readline()
        assert cluster.popen(1, [*PROGRAM, "reach", "host0"]).wait(60) == 1, "that one listens in the other cluster"
        assert other.popen(0, [*PROGRAM, "reach", "host0"]).wait(60) == 0
        lonely.wait(60)
        lonely.close()


def of_session(mark: str) -> list[int]:
    return [pid for pid in marked_processes(mark) if pid in living_pids()]


def test_nothing_is_left_when_the_launcher_is_killed(tmp_path: Path) -> None:
    """Not the hosts, not what they run, not even what tried to get away."""
    mark = f"{os.environ[MARK]}-killed"
    ready = tmp_path / "ready"
    launcher = subprocess.Popen([*PROGRAM, "hold", str(ready)], env={**os.environ, MARK: mark}, text=True)
    with killed_at_end(launcher):
        wait_until(ready.exists, 30, "the cluster is up")
        pids = of_session(mark)
        networks = {os.readlink(f"/proc/{pid}/ns/net") for pid in pids}
        assert len(pids) >= 10, "launcher, switch, 2 first processes, 4 sleepers, 2 daemons"
        assert len(networks) == 4, "ours, the switch's, two hosts'"
    wait_until(lambda: not of_session(mark), 60, "every process ends")
    networks.remove(os.readlink("/proc/self/ns/net"))
    # A process on its way out loses its memory, and with it the mark, before it leaves its namespace.
    wait_until(
        lambda: not [pid for pid in living_pids() if namespace_of(pid) in networks], 10,
        "a namespace lives as long as a process in it",
    )  # fmt: skip
    assert not Path("/dev/shm/segment").exists()


def namespace_of(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return ""


def test_programs_end_with_the_cluster() -> None:
    with EmulatedCluster(1, [1e9]) as cluster:
        cluster.popen(0, [*PROGRAM, "daemon"]).wait(60)
        process = cluster.popen(0, ["sleep", "300"])
    assert process.wait(60) == -signal.SIGKILL
    assert namespace_of(process.pid) == ""
    with pytest.raises(SynclineError, match="has ended"):
        cluster.popen(0, ["true"])


def test_hosts_end_with_the_switch() -> None:
    with EmulatedCluster(2, [1e9, 1e9]) as cluster:
        processes = [cluster.popen(0, ["sleep", "300"]), cluster.call(1, time.sleep, 300)]
        assert cluster._switch is not None
        cluster._switch.kill()
        assert [process.wait(60) for process in processes] == [-signal.SIGKILL] * 2
        with pytest.raises(SynclineError, match="the switch of the emulated cluster has ended"):
            cluster.cut(0)
        with pytest.raises(SynclineError, match="host1 has ended"):
            cluster.popen(1, ["true"])


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives privileges up, so it needs them first")


@as_root
def test_user_namespace_takes_the_place_of_root() -> None:
    done = subprocess.run([*PROGRAM, "powerless", "setfcap", *PROGRAM, "two_hosts"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "100000 0\n"), done.stdout + done.stderr


@as_root
def test_where_neither_is_allowed_the_error_says_what_to_allow() -> None:
    """Since Linux 5.12 root's own number can be mapped only with a privilege that is gone here."""
    done = subprocess.run([*PROGRAM, "powerless", "nothing", *PROGRAM, "two_hosts"], capture_output=True, text=True)
    assert done.returncode == UsageError.exit_code, done.stdout + done.stderr
    for words in ("cannot create a network namespace", "Run as root", "user namespaces", "--privileged"):
        assert words in done.stdout


@pytest.mark.parametrize(
    ("text", "hosts", "rates"),
    [
        ("1gbit", 3, [1e9, 1e9, 1e9]),
        ("1gbit,100mbit", 2, [1e9, 1e8]),
        ("2.5gbit", 1, [2.5e9]),
    ],
)
def test_links_are_one_rate_or_one_a_host(text: str, hosts: int, rates: list[float]) -> None:
    assert parse_links(text, hosts) == rates


@pytest.mark.parametrize(
    ("text", "hosts", "words"),
    [
        ("1gbit,1gbit", 3, "2 rates for 3 hosts"),
        ("fast", 2, "'fast' is not a rate"),
        ("1gbit", 0, "0 hosts"),
        ("1gbit", 65, "1 to 64"),
        ("1kbit", 2, "cannot emulate a link of 1 kbit/s"),
        ("100gbit", 2, "cannot emulate a link of 100 Gbit/s"),
    ],
)
def test_links_that_cannot_be_are_refused(text: str, hosts: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_links(text, hosts)


@pytest.mark.parametrize("rate", [1e5, 1e7, 1e8, 1e9, 2.5e9, 1e10, 34e9])
def test_packets_fit_into_the_burst_with_their_headers(rate: float) -> None:
    """Else the bucket would cut each into frames, and be slower than its rate."""
    shape = shape_of(rate)
    assert shape.packet * 1514 / 1448 < shape.burst
    assert shape.burst < 0.0006 * rate / 8 or shape.burst < 75_000, "little beside what the link carries in a second"
    assert shape.burst < shape.queue < 2**32
    assert shape.bytes_per_s < 2**32


def test_hosts_have_distinct_addresses_beyond_256() -> None:
    assert len({host_address(host) for host in range(1000)}) == 1000


SHARING = """
import json, os, sys
from dataclasses import replace
from datetime import timedelta
import torch
from syncline.comm.shared_memory import count_hosts
from syncline.comm.torch_backend import connect
from syncline.errors import PlanError
from syncline.launcher.adopt import placement_from_environment
from syncline.sync import make_sync

place = placement_from_environment()
# As a launcher would that takes all hosts for one, or one that says the truth.
if "lie" in sys.argv:
    place = replace(place, host_index=0)
communicator = connect(place, backend="gloo", deadline=timedelta(seconds=30))
found = {"hosts": count_hosts(communicator)}
kept = []  # a rank that dropped its channels at once would break off the other's, which is still making them
for method in ("shared-memory", "hierarchical"):
    try:
        kept.append(make_sync(method, communicator))
        found[method] = "made"
    except PlanError as error:
        found[method] = error.message
if place.rank == 0:
    print(json.dumps(found), flush=True)
communicator.all_reduce(torch.zeros(1))
os._exit(0)  # the store is on rank 0, and torch may abort a rank that outlives it
"""


def shared(cluster: EmulatedCluster, tmp_path: Path, *arguments: str) -> dict[str, object]:
    script = tmp_path / "sharing.py"
    script.write_text(SHARING)
    variables = {"MASTER_ADDR": cluster.address(0), "MASTER_PORT": "29500", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    ranks = []
    for host in range(2):
        own = {"RANK": str(host), "GROUP_RANK": str(host), "GROUP_WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
        environment = {**os.environ, **variables, **own}
        ranks.append(
            cluster.popen(host, [sys.executable, str(script), *arguments], env=environment, stdout=subprocess.PIPE)
        )
    assert ranks[0].stdout is not None
    text = ranks[0].stdout.read()
    assert [rank.wait(60) for rank in ranks] == [0, 0]
    for rank in ranks:
        rank.close()
    found: dict[str, object] = json.loads(text)
    return found


@pytest.mark.parametrize("arguments", [(), ("lie",)])
def test_methods_do_not_take_emulated_hosts_for_one(
    arguments: tuple[str, ...], cluster: EmulatedCluster, tmp_path: Path
) -> None:
    """Not even if the launcher did: memory is only shared where it can be."""
    found = shared(cluster, tmp_path, *arguments)
    assert found["hosts"] == 2
    assert "not on one host" in str(found["shared-memory"])
    expected = "share no memory" if arguments else "made"
    assert expected in str(found["hierarchical"])
    assert choose_method(device="cpu", workers=2, num_hosts=2)[0] == "ahead"
