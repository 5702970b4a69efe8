"""Programs written for torch's DistributedDataParallel give the same losses and weights with one line swapped.

Each is compared with itself in the same process and world: over 20 steps, with every method that a script would
choose, under both launchers (see programs/side_by_side.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import SYNCLINE

SIDE_BY_SIDE = Path(__file__).parent / "programs" / "side_by_side.py"
TORCHRUN = Path(sys.executable).with_name("torchrun")
METHODS = ["bucketed", "shared-memory", "all-reduce", "auto"]
PROGRAMS = ["imagenet", "nanogpt", "gan", "ema", "bert", "sparse", "uneven"]
ROUNDING = 1e-8
"""Of float64, after 20 steps of optimisers that divide small numbers by each other."""
ROUNDING_OF_FLOAT32 = 1e-4


@pytest.mark.parametrize(
    ("launcher", "world_size"),
    [([TORCHRUN, "--nproc-per-node", "2"], 2), ([SYNCLINE, "launch", "--workers", "3", "--"], 3)],
    ids=["torchrun, 2 ranks", "syncline launch, 3 ranks"],
)
def test_programs_give_what_ddp_gives(launcher: list[object], world_size: int, tmp_path: Path) -> None:
    """To the bit on two ranks. On three, sums are divided at another moment, which costs the last digits."""
    command = [str(word) for word in (*launcher, SIDE_BY_SIDE, tmp_path)]
    environment = {**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    for rank in range(world_size):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert list(found) == PROGRAMS
        for name, by_method in found.items():
            assert list(by_method) == METHODS
            bound = 0.0 if world_size == 2 else ROUNDING_OF_FLOAT32 if name == "imagenet" else ROUNDING
            for method, one in by_method.items():
                what = f"rank {rank}, {name}, {method}: {one.get('error', one)}"
                assert one.get("losses", 1.0) <= bound, what
                assert one["weights"] <= bound, what
                assert one["same names"], what
                assert one["steps"] >= (2 * (10 - 3 * rank) if name == "uneven" else 20), what
