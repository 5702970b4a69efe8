"""syncline cluster run: a script on emulated hosts sees what torchrun would show it; its failure is told whole."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

from conftest import SYNCLINE, Cli, cli_environment, killed_at_end, living_pids, read_quietly, wait_until

SCRIPT = """
import os, socket, sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
own = torch.zeros(500_000)
own[0] = 1 + dist.get_rank()
dist.all_reduce(own)
place = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")]
place.append(int(own[0]))
print(socket.gethostname(), os.environ["MASTER_ADDR"], *place, os.environ.get("TORCH_CPP_LOG_LEVEL"), flush=True)
dist.barrier()
dist.destroy_process_group()
if dist.is_initialized() or place[0] in sys.argv[1:]:
    print("this is my own mistake", file=sys.stderr, flush=True)
    os._exit(7)
"""


def test_script_runs_on_every_host_as_under_torchrun(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    arguments = ("--hosts", 2, "--workers-per-host", 2, "--link", "1gbit", "--all-ranks", "--", "python")
    done = cli("cluster", "run", *arguments, tmp_path / "script.py")
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    for rank, line in enumerate(lines):
        host, local = divmod(rank, 2)
        assert line == f"host{host} rank {rank}: host{host} 10.0.0.1 {rank} 4 {local} 2 {host} 10 None"
    assert len(lines) == 4
    assert "TCPStore" not in done.stderr


def test_failing_rank_gives_exit_code_host_and_its_own_words(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = cli("cluster", "run", "--hosts", 2, "--log-dir", "logs", "--", "python", tmp_path / "script.py", "1")
    assert done.returncode == 7, done.stderr
    assert done.stderr.endswith("this is my own mistake\nsyncline: [rank 1] ended with exit code 7 on host1.\n")
    assert done.stdout == "host0 10.0.0.1 0 2 0 1 0 3 None\n", "rank 0 alone is shown"
    logged = (tmp_path / "work" / "logs" / "rank-1.stdout.log").read_text()
    assert logged == "host1 10.0.0.1 1 2 0 1 1 3 None\n"


def test_interrupt_ends_every_host(tmp_path: Path) -> None:
    up = tmp_path / "up"
    script = ["sh", "-c", f"echo up >> {up}; sleep 300"]
    process = subprocess.Popen(
        [str(SYNCLINE), "cluster", "run", "--hosts", "2", "--", *script],
        env=cli_environment(), stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    with killed_at_end(process):
        wait_until(lambda: up.is_file() and up.read_text().count("up") == 2, 60, "both ranks run")
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=40)
    assert (process.returncode, stderr) == (130, "syncline: Stopped by Ctrl-C; every rank has ended.\n")
    assert not [pid for pid in living_pids() if str(up).encode() in read_quietly(Path(f"/proc/{pid}/cmdline"))]
