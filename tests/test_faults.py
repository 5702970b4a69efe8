"""What goes wrong while training: a rank or the launcher is killed, the user's code raises, the user presses Ctrl-C.

Each time all processes end in seconds, the right rank is named, what was recorded can be read, and the run can be
resumed to the weights of a run that nothing happened to.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import (
    SYNCLINE,
    USER_MODEL,
    CliServer,
    any_alive,
    cli_environment,
    killed_at_end,
    session_members,
    wait_until,
)

from syncline.spans import read_log
from syncline.store import RunFolder

WORKERS = 3
PLAN = (
    *("--model", "user_model:Net", "--data", "synthetic", "--workers", str(WORKERS), "--threads", "1"),
    *("--global-batch", "20", "--steps", "40", "--set", "checkpoint.every=4", "--set", "evaluate=false"),
)


@dataclass
class Running:
    """`syncline train` in a session of its own, with at least one checkpoint behind it and many steps ahead."""

    process: subprocess.Popen[str]
    run: RunFolder
    ranks: list[int]

    def end(self) -> tuple[int, str]:
        """Exit code and stderr. Everything must be gone ten seconds after the blow at the latest."""
        _, errors = self.process.communicate(timeout=60)
        wait_until(lambda: not session_members(self.process.pid), 60, "every process gone")
        assert not any_alive(self.ranks)
        return self.process.returncode, errors

    def assert_logs_are_readable(self) -> None:
        for rank in range(WORKERS):
            header, *records = read_log(self.run.events(rank))
            assert (header["kind"], header["rank"]) == ("header", rank)
            assert records


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    (folder / "user_model.py").write_text(USER_MODEL)
    return folder


def environment(workplace: Path, **extra: str) -> dict[str, str]:
    path = os.pathsep.join([str(workplace), *filter(None, [os.environ.get("PYTHONPATH")])])
    return cli_environment(PYTHONPATH=path, **extra)


@pytest.fixture(scope="module")
def finish(workplace: Path, cli_server: CliServer) -> Callable[..., str]:
    """Train to the end; the weights."""

    def run(*arguments: str) -> str:
        done = cli_server.run(("train", *arguments, "--json"), workplace, environment(workplace))
        assert done.returncode == 0, done.stderr
        return str(json.loads(done.stdout)["weights_sha256"])

    return run


@pytest.fixture(scope="module")
def untroubled(finish: Callable[..., str]) -> str:
    """The weights of a run that nothing happened to."""
    return finish(*PLAN, "--run-dir", "untroubled")


def assert_resumes(finish: Callable[..., str], run: RunFolder, weights: str) -> None:
    assert finish("--resume", str(run.path)) == weights
    assert run.info()["status"] == "finished"


@contextmanager
def training(workplace: Path, folder: Path, *arguments: str, **extra: str) -> Iterator[Running]:
    folder.mkdir(exist_ok=True)
    run = RunFolder(folder / "run")
    process = subprocess.Popen(
        [str(SYNCLINE), "train", *PLAN, *arguments, "--run-dir", str(run.path)],
        env=environment(workplace, PIDS=str(folder), **extra),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=workplace,
        start_new_session=True,
    )
    with killed_at_end(process):
        wait_until(lambda: run.checkpoint_step() or process.poll() is not None, 60, "a checkpoint")
        yield Running(process, run, [int((folder / str(rank)).read_text()) for rank in range(WORKERS)])


def last_line(errors: str) -> str:
    return errors.splitlines()[-1]


def test_killed_rank_is_named_and_the_run_resumes_bit_for_bit(
    workplace: Path, untroubled: str, finish: Callable[..., str], tmp_path: Path
) -> None:
    """Rank 0, which keeps the run folder; the next test kills the last one."""
    with training(workplace, tmp_path, SLOW="0.1") as running:
        os.kill(running.ranks[0], signal.SIGKILL)
        code, errors = running.end()
    assert code == 1
    assert last_line(errors).startswith("syncline: [rank 0] killed by SIGKILL"), errors
    assert "Traceback" not in errors
    assert running.run.info()["status"] == "failed"
    running.assert_logs_are_readable()
    assert_resumes(finish, running.run, untroubled)


def test_killed_rank_and_all_others_are_restarted_bit_for_bit(
    workplace: Path, untroubled: str, tmp_path: Path
) -> None:
    with training(workplace, tmp_path, "--max-restarts", "2", SLOW="0.02") as running:
        os.kill(running.ranks[2], signal.SIGKILL)
        _, errors = running.process.communicate(timeout=60)
        wait_until(lambda: not session_members(running.process.pid), 60, "every process gone")
    assert running.process.returncode == 0, errors
    assert "[rank 2] killed by SIGKILL" in last_line(errors)
    assert last_line(errors).endswith("All ranks start again from the last checkpoint, restart 1 of 2.")
    summary = running.run.summary()
    assert summary is not None
    assert summary["weights_sha256"] == untroubled
    assert summary["timed_steps"] < summary["steps"] == 40, "the second start must not have begun anew"
    assert (running.run.logs / "rank-2.stderr.0.log").exists()


def test_ranks_end_with_their_launcher_and_the_run_resumes_bit_for_bit(
    workplace: Path, untroubled: str, finish: Callable[..., str], tmp_path: Path
) -> None:
    with training(workplace, tmp_path, SLOW="0.1") as running:
        running.process.kill()
        code, errors = running.end()
    assert (code, errors.count("Traceback")) == (-signal.SIGKILL, 0)
    assert running.run.info()["status"] == "running"  # nobody was left to say otherwise
    running.assert_logs_are_readable()
    assert_resumes(finish, running.run, untroubled)


def test_ctrl_c_says_how_to_go_on_and_the_run_resumes_bit_for_bit(
    workplace: Path, untroubled: str, finish: Callable[..., str], tmp_path: Path
) -> None:
    with training(workplace, tmp_path, SLOW="0.1") as running:
        os.killpg(running.process.pid, signal.SIGINT)
        code, errors = running.end()
    assert code == 130
    said = [line for line in errors.splitlines() if not line.startswith("Warning: ")]
    assert len(said) == 1, errors
    assert said[0].startswith("syncline: Stopped by Ctrl-C")
    assert said[0].endswith(f"with: syncline train --resume {running.run.path}")
    assert running.run.info()["status"] == "stopped"
    running.assert_logs_are_readable()
    assert_resumes(finish, running.run, untroubled)


def test_exception_of_the_users_model_is_shown_after_as_many_restarts_as_asked_with_its_traceback_and_rank(
    workplace: Path, tmp_path: Path
) -> None:
    with training(workplace, tmp_path, "--max-restarts", "1", BROKEN="1", SLOW="0.02") as running:
        code, errors = running.end()
    assert code == 1
    assert errors.count("start again from the last checkpoint") == 1
    assert errors.count("Traceback (most recent call last)") == 1
    assert 'raise ArithmeticError("my own mistake")' in errors
    assert "user_model.py" in errors
    assert last_line(errors).startswith("syncline: [rank 1] ArithmeticError: my own mistake"), errors
    assert running.run.info()["status"] == "failed"
    running.assert_logs_are_readable()
