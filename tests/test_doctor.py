"""syncline doctor: each finding says what was found and what to do; a failure is an exit code; nodes are named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import emulation_programs
import pytest
from conftest import Cli

from syncline.launcher import doctor
from syncline.launcher.emulation import EmulatedCluster

PROGRAM = [sys.executable, emulation_programs.__file__, "between_nodes"]


def test_this_machine_is_examined_line_by_line(cli: Cli) -> None:
    document = json.loads(cli("doctor", "--json").stdout)
    found = {one["what"]: one for one in document["findings"]}
    for what in (
        "load",
        "cores",
        "threads",
        "memory",
        "memory bandwidth",
        "bf16 compute",
        "torch",
        "backends",
        "shared memory",
        "run folder",
    ):
        assert found[what]["status"] in ("ok", "warn"), found[what]
        assert found[what]["found"]
        assert found[what]["fix"] or found[what]["status"] == "ok", "what is not ok says how to mend it"
    assert "emulated hosts" in found
    assert document["passed"]


def test_failure_is_told_with_its_fix_and_exit_code_1(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    done = cli("doctor", "--folder", tmp_path / "file" / "runs")
    assert done.returncode == 1
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("fail")]
    assert "run folder" in line
    assert "--folder" in line
    assert done.stdout.endswith("fix what failed first\n")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("fpu avx512f avx512_bf16 sse", "avx512_bf16: --precision bf16 may be faster"),
        ("fpu amx_bf16 avx512_bf16", "amx_bf16, avx512_bf16:"),
        ("fpu avx512f avx512_bf16x", "no instructions"),
    ],
)
def test_bf16_instructions_are_read_from_the_kernels_list(flags: str, words: str, tmp_path: Path) -> None:
    table = tmp_path / "cpuinfo"
    table.write_text(f"processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: {flags}\n\nprocessor\t: 1\nflags\t: none\n")
    finding = doctor.examine_bf16(table)
    assert finding.status == "ok"
    assert words in finding.found
    assert "no instructions" in doctor.examine_bf16(tmp_path / "nothing").found


@pytest.mark.parametrize(("kilobytes", "status"), [(9_000_000, "ok"), (100_000, "warn")])
def test_little_memory_is_a_warning(kilobytes: int, status: str, tmp_path: Path) -> None:
    table = tmp_path / "meminfo"
    table.write_text(f"MemAvailable: {kilobytes} kB\n")
    assert doctor.examine_memory(table).status == status


@pytest.mark.parametrize(("text", "status"), [("1", "ok"), ("4096", "warn"), ("many", "warn")])
def test_threads_beyond_the_cores_are_a_warning(text: str, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    finding = doctor.examine_threads()
    assert (finding.status, text in finding.found) == (status, True)


def findings(cluster: EmulatedCluster, folders: list[Path], nodes: int, wait_s: float) -> list[list[dict[str, Any]]]:
    """What each of the hosts says; fewer of them may come than there should be."""
    running = [
        cluster.popen(host, [*PROGRAM, str(host), str(nodes), str(wait_s), str(folder)], stdout=subprocess.PIPE)
        for host, folder in enumerate(folders)
    ]
    said = []
    for process in running:
        assert process.stdout is not None
        said.append(json.loads(process.stdout.read()))
        assert process.wait(60) == 0
        process.close()
    return said


def test_nodes_are_named_with_their_links_and_the_one_that_is_missing(tmp_path: Path) -> None:
    with EmulatedCluster(2, [1e9, 1e8]) as cluster:
        first, second = findings(cluster, [tmp_path / "runs"] * 2, nodes=3, wait_s=8)
    assert [one["status"] for one in second] == ["ok", "ok"]
    by_name = {one["what"]: one for one in first}
    assert "eth0 (10.0.0.1)" in by_name["interface"]["found"]
    link = by_name["node 1 (host1)"]
    assert link["status"] == "warn", "100 Mbit/s is slow for training"
    assert "Mbit/s to node 0" in link["found"]
    assert by_name["checkpoints on node 1"]["status"] == "ok"
    assert (by_name["node 2"]["status"], "did not connect" in by_name["node 2"]["found"]) == ("fail", True)
    assert list((tmp_path / "runs").iterdir()) == [], "nothing is left behind"
