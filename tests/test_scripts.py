"""`syncline launch script.py`: the script finds what torchrun gives it, and ends as it does there."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import SYNCLINE, Cli, killed_at_end, wait_until

import syncline

TORCHRUN = Path(sys.executable).with_name("torchrun")

PROBE = """
import json, multiprocessing, os, signal, sys, threading
import beside

def word():
    return __name__

rank = os.environ["RANK"]
found = {
    "argv": sys.argv, "name": __name__, "file": __file__, "path": sys.path, "folder": os.getcwd(),
    "spec": __spec__, "package": __package__, "doc": __doc__, "function": word.__module__,
    "is main": sys.modules["__main__"].__dict__ is globals(),
    "annotations": (lambda: 0).__code__.co_flags,
    "start method": multiprocessing.get_start_method(allow_none=True),
    "process": multiprocessing.current_process().name, "parent": multiprocessing.parent_process(),
    "daemon": multiprocessing.current_process().daemon, "threads": threading.current_thread().name,
    "stdout": [type(sys.stdout.buffer).__name__, sys.stdout.write_through, sys.stdout.encoding, sys.stdout.errors],
    "stderr": [type(sys.stderr.buffer).__name__, sys.stderr.write_through, sys.stderr.encoding, sys.stderr.errors],
    "stdin": sys.stdin.readline() if rank == sys.argv[2] else "",
    "handlers": [str(signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)],
    "own variable": os.environ.get("MINE"),
}
with open(os.path.join(sys.argv[1], rank), "w") as file:
    json.dump(found, file)
"""


def run(command: list[object], folder: Path, **settings: object) -> subprocess.CompletedProcess[str]:
    """torchrun leaves a folder among temporary files. What hangs up may be ignored here (nohup), but not there."""
    scratch = folder / "scratch"
    scratch.mkdir(exist_ok=True)
    environment = {**os.environ, "TMPDIR": str(scratch), "MINE": "yes", "OMP_NUM_THREADS": "1"}
    words = [str(word) for word in command]
    settings["preexec_fn"] = functools.partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)
    return subprocess.run(words, capture_output=True, text=True, cwd=folder, env=environment, **settings)


def script(folder: Path, text: str) -> Path:
    path = folder / "mine.py"
    path.write_text(text)
    return path


def test_script_finds_what_torchrun_gives_it(tmp_path: Path) -> None:
    """Started through a link in another folder, with a relative path, and with something to read."""
    code = tmp_path / "code"
    code.mkdir()
    (code / "beside.py").write_text("")
    (tmp_path / "link.py").symlink_to(script(code, PROBE))
    launchers = {
        "torchrun": [TORCHRUN, "--nproc-per-node", "2"],
        "syncline": [SYNCLINE, "launch", "--workers", "2", "--"],
    }
    found = {}
    for name, launcher in launchers.items():
        (tmp_path / name).mkdir()
        done = run([*launcher, "link.py", name, "0", "--lr", "0.1"], tmp_path, input="a line\n")
        assert done.returncode == 0, done.stderr
        ranks = [json.loads((tmp_path / name / rank).read_text()) for rank in ("0", "1")]
        for rank in ranks:
            assert rank["argv"].pop(1) == name
        found[name] = ranks
    assert found["syncline"] == found["torchrun"]
    assert found["syncline"][0]["stdin"] == "a line\n"


LOADER = """
import os, sys, torch
from torch.utils.data import DataLoader

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return index

loader = DataLoader(Numbers(), batch_size=4, num_workers=2, collate_fn=lambda numbers: sum(numbers))
for epoch in range(2):
    sums = list(loader)
with open(os.environ["RANK"], "w") as file:
    file.write(str(sums))
"""


def test_data_loader_without_a_main_guard_and_with_a_lambda(cli: Cli, tmp_path: Path) -> None:
    """Its workers are forked, so nothing of it is pickled, and none of them loads torch again."""
    done = cli("launch", script(tmp_path, LOADER), "--workers", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / rank).read_text() for rank in ("0", "1")] == ["[6, 22]"] * 2


def test_function_has_forked_loader_workers_too() -> None:
    import multiprocessing

    find = lambda: multiprocessing.get_start_method(allow_none=True)  # noqa: E731
    assert syncline.launch(find, workers=1, threads=1) == [None]


@pytest.mark.parametrize("code", [0, 3])
def test_exit_code_says_how_a_script_went(code: int, cli: Cli, tmp_path: Path) -> None:
    """0 is a success even where the script leaves without a word; and what it printed is there."""
    path = script(
        tmp_path, f"import os\nprint('said', end='')\nif os.environ['RANK'] == '1':\n    os._exit({code})\n"
    )
    done = cli("launch", path, "--workers", "2", "--log-dir", tmp_path / "logs")
    assert done.stdout == "said"
    assert (tmp_path / "logs" / "rank-1.stdout.log").read_text() == "said"
    assert done.returncode == (1 if code else 0), done.stderr
    assert done.stderr.startswith("syncline: [rank 1] ended with exit code 3" if code else "")


HANDLER = """
import os, signal, subprocess, sys, time
from pathlib import Path

def save(number, frame):
    Path(os.environ["RANK"] + ".saved").write_text(signal.Signals(number).name)
    sys.exit(0)

child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
child.terminate()
Path(os.environ["RANK"] + ".child").write_text(str(child.wait(60)))
signal.signal(signal.SIGTERM, save)
Path(os.environ["RANK"] + ".ready").write_text("")
time.sleep(600)
"""


def test_script_may_handle_signals_and_end_its_own_programs(tmp_path: Path) -> None:
    command = [str(SYNCLINE), "launch", str(script(tmp_path, HANDLER)), "--workers", "2"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    with killed_at_end(process):
        wait_until(lambda: len(list(tmp_path.glob("*.ready"))) == 2, 60, "both ranks ready")
        assert [(tmp_path / f"{rank}.child").read_text() for rank in range(2)] == [str(-signal.SIGTERM)] * 2
        process.terminate()
        _, err = process.communicate(timeout=30)
    assert err.splitlines()[-1] == "syncline: Stopped by SIGTERM; every rank has ended."
    assert [(tmp_path / f"{rank}.saved").read_text() for rank in range(2)] == ["SIGTERM"] * 2


def test_every_rank_is_shown_where_asked_for(cli: Cli, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = script(
        tmp_path,
        "import os, sys\nrank = os.environ['RANK']\nprint('out', rank)\n"
        "sys.stderr.write('two\\nerr' + ('' if rank == '1' else '\\n'))\n",
    )
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "rank-1.stdout.log").write_text("of an earlier run\n")
    done = cli("launch", path, "--workers", "3", "--all-ranks", "--log-dir", logs)
    assert sorted(done.stdout.splitlines()) == ["out 0", "rank 1: out 1", "rank 2: out 2"]
    assert {"rank 1: two", "rank 1: err", "rank 2: two", "rank 2: err"} <= set(done.stderr.splitlines())
    assert (logs / "rank-1.stdout.log").read_text() == "out 1\n"
    capfd.readouterr()
    syncline.launch(lambda: print("rank", os.environ["RANK"]), workers=2, threads=1, all_ranks=True)
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["rank 0", "rank 1: rank 1"]
    assert err == ""
