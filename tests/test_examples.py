"""The examples run as their docstrings say, alone and on many workers, and learn the same; and `syncline launch`."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import SYNCLINE, Cli
from torch import Tensor

import syncline

EXAMPLES = Path(__file__).parents[1] / "examples"
PLAIN, PARALLEL = EXAMPLES / "plain_loop.py", EXAMPLES / "data_parallel_loop.py"
TORCHRUN = Path(sys.executable).with_name("torchrun")
EPOCH = re.compile(r"^epoch \d: loss (\d+\.\d+)", re.MULTILINE)


def run_example(path: Path) -> dict[str, Tensor]:
    """In float64, where the order of summation stays a matter of the last digits over a whole training."""
    torch.set_default_dtype(torch.float64)
    return dict(runpy.run_path(str(path), run_name="__main__")["model"].state_dict())


def test_example_ends_with_the_same_weights_on_one_worker_and_on_two() -> None:
    (alone,) = syncline.launch(run_example, PARALLEL, workers=1, threads=1)
    first, second = syncline.launch(run_example, PARALLEL, workers=2, threads=1)
    assert list(first) == ["0.weight", "0.bias", "3.weight", "3.bias"]
    assert all(torch.equal(second[key], first[key]) for key in first)
    torch.testing.assert_close(first, alone, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    "command",
    [
        [sys.executable, PLAIN],
        [sys.executable, PARALLEL],
        [TORCHRUN, "--nproc-per-node", "2", PARALLEL],
        [SYNCLINE, "launch", PARALLEL, "--workers", "2"],
    ],
    ids=["plain", "alone", "torchrun", "syncline launch"],
)
def test_example_runs_as_its_docstring_says(command: list[object], tmp_path: Path) -> None:
    folder, scratch = tmp_path / "work", tmp_path / "scratch"  # torchrun leaves a folder among temporary files
    folder.mkdir()
    scratch.mkdir()
    environment = {**os.environ, "TMPDIR": str(scratch)}
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    losses = [float(text) for text in EPOCH.findall(done.stdout)]
    assert len(losses) == 3, done.stdout
    assert losses[-1] < losses[0]
    assert list(folder.iterdir()) == []


def test_diff_between_the_examples_is_small() -> None:
    """What a user has to change: the wrapper, the loader, and who prints what."""
    code = [path.read_text().partition('"""\n\nimport torch')[2].splitlines() for path in (PLAIN, PARALLEL)]
    plain, parallel = code
    assert len([line for line in parallel if line.strip() and line not in plain]) <= 7


LANGUAGE, PLAIN_LANGUAGE = EXAMPLES / "language_model.py", EXAMPLES / "plain_language_model.py"


def run_language_model(*arguments: object) -> dict[str, Tensor]:
    torch.set_default_dtype(torch.float64)
    sys.argv = [str(LANGUAGE), *map(str, arguments)]
    return dict(runpy.run_path(str(LANGUAGE), run_name="__main__")["model"].state_dict())


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(b"".join(b"%d bottles of milk on the wall, " % number for number in range(130)))
    return path


def test_language_model_ends_with_the_same_weights_however_it_is_split_and_stopped(text_file: Path) -> None:
    """66 windows in batches of 20 on two workers: the last batch is smaller, and clipping sees the whole batch."""
    given = ("--text", text_file, "--epochs", 2, "--batch", 20, "--clip-norm", 0.5)
    (alone,) = syncline.launch(run_language_model, *given, workers=1, threads=1)
    first, second = syncline.launch(run_language_model, *given, workers=2, threads=1)
    assert all(torch.equal(second[key], first[key]) for key in first)
    torch.testing.assert_close(first, alone, rtol=1e-6, atol=1e-8)
    stopped = (*given, "--checkpoint", text_file.with_name("last.pt"))
    halfway, _ = syncline.launch(run_language_model, *stopped, "--stop-after", 1, workers=2, threads=1)
    resumed, _ = syncline.launch(run_language_model, *stopped, workers=2, threads=1)
    assert not torch.equal(halfway["head.weight"], first["head.weight"])
    assert all(torch.equal(resumed[key], first[key]) for key in first)


@pytest.mark.parametrize(
    "command",
    [
        [sys.executable, PLAIN_LANGUAGE],
        [SYNCLINE, "launch", LANGUAGE, "--workers", "2", "--", "--bf16", "--clip-norm", "1"],
    ],
    ids=["plain", "bf16 on two workers"],
)
def test_language_model_learns_a_text_of_its_own(command: list[object], tmp_path: Path) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    losses = [float(text) for text in EPOCH.findall(done.stdout)]
    assert len(losses) == 3, done.stdout
    assert losses[-1] < losses[0] < 5.6, "less than all 256 bytes being equally likely"


def test_plain_language_model_goes_on_where_it_stopped(text_file: Path) -> None:
    def epochs(*arguments: object) -> list[str]:
        command = [sys.executable, PLAIN_LANGUAGE, "--text", text_file, "--epochs", 2, "--batch", 20, *arguments]
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True, cwd=text_file.parent)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    first, second = epochs()
    assert epochs("--checkpoint", "last.pt", "--stop-after", 1) == [first]
    assert epochs("--checkpoint", "last.pt") == [second]


def test_diff_between_the_language_models_is_small() -> None:
    plain, parallel = (path.read_text().splitlines() for path in (PLAIN_LANGUAGE, LANGUAGE))
    code = parallel[parallel.index("import argparse") :]
    assert len([line for line in code if line.strip() and line not in plain]) <= 9


@pytest.fixture
def parquet_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "parquet"
    folder.mkdir()
    shutil.copy(EXAMPLES / "parquet_data.py", folder)
    subprocess.run([sys.executable, "parquet_data.py"], cwd=folder, check=True)
    return folder


def test_parquet_example_trains_as_its_docstring_says(cli: Cli, parquet_folder: Path) -> None:
    text = (EXAMPLES / "parquet_data.py").read_text()
    (command,) = re.findall(r"^    syncline (train .*)$", text, re.MULTILINE)
    done = cli(*command.split(), "--threads", "1", "--set", "measure.calibration=0", cwd=parquet_folder)
    assert done.returncode == 0, done.stderr
    losses = [float(value) for value in re.findall(r"training loss ([\d.]+), margin", done.stdout)]
    assert len(losses) == 3, done.stdout
    assert losses[-1] < losses[0]


# syncline launch.


def script(folder: Path, text: str) -> Path:
    path = folder / "mine.py"
    path.write_text(text)
    return path


def test_launch_without_the_script_is_refused(cli: Cli) -> None:
    done = cli("launch", "missing.py")
    assert done.returncode == 2
    assert done.stderr == "syncline: there is no script missing.py.\n"


def test_launch_hands_arguments_and_the_script_s_folder_on(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("WORD = 'beside'")
    path = script(
        tmp_path,
        "import beside, os, sys\n"
        "from pathlib import Path\n"
        "assert __name__ == '__main__'\n"
        "Path(sys.argv[2], os.environ['RANK']).write_text(' '.join([beside.WORD, *sys.argv[1:2], *sys.argv[3:]]))\n",
    )
    out = tmp_path / "out"
    out.mkdir()
    done = cli("launch", path, "--workers", "2", "--", "--lr", out, "--workers", "7")
    assert done.returncode == 0, done.stderr
    assert [(out / rank).read_text() for rank in ("0", "1")] == ["beside --lr --workers 7"] * 2


def test_launch_shows_the_script_s_own_traceback_and_rank(cli: Cli, tmp_path: Path) -> None:
    path = script(tmp_path, "import os\nif os.environ['RANK'] == '1':\n    {}['my own mistake']\n")
    done = cli("launch", path, "--workers", "2")
    assert done.returncode == 1
    assert "mine.py\", line 3, in <module>\n    {}['my own mistake']" in done.stderr
    assert "KeyError: 'my own mistake'" in done.stderr
    assert re.fullmatch(r"syncline: \[rank 1\] .*", done.stderr.splitlines()[-1])
