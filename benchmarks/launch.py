"""Launch to first step: `run_ranks` beside torchrun, interleaved, with the same function in the ranks.

    python benchmarks/launch.py --workers 4 --repeats 3

Both are timed from the start of a fresh Python process until its end; the ranks join a Gloo group and make one
all-reduce. Prints the medians and their ratio, ours over torchrun's: below 1 is faster than torchrun.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_STEP = """
def first_step():
    import time, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    print("first step", time.time(), flush=True) if dist.get_rank() == 0 else None
    dist.destroy_process_group()
"""
_OURS = (
    "from syncline.launcher.here import run_ranks\n"
    + _STEP
    + "run_ranks(first_step, workers={workers}, log_dir=None)\n"
)
_TORCHRUN = _STEP + "first_step()\n"


def measure(command: list[str], folder: str) -> tuple[float, float]:
    """Seconds from the start of the command to rank 0's first step, and to the command's end."""
    started = time.time()
    # torchrun leaves its log folder behind; there it goes away with ours.
    surroundings = {**os.environ, "TMPDIR": folder}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=surroundings)
    ended = time.time()
    step = next(line for line in done.stdout.splitlines() if line.startswith("first step"))
    return float(step.split()[-1]) - started, ended - started


def commands(folder: Path, workers: int) -> dict[str, list[str]]:
    ours, plain = folder / "ours.py", folder / "plain.py"
    ours.write_text(_OURS.format(workers=workers))
    plain.write_text(_TORCHRUN)
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}", str(plain)]
    return {"syncline": [sys.executable, str(ours)], "torchrun": [sys.executable, *torchrun]}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--workers", type=int, default=4)
    options.add_argument("--repeats", type=int, default=3)
    chosen = options.parse_args()
    times: dict[str, list[tuple[float, float]]] = {"syncline": [], "torchrun": []}
    with tempfile.TemporaryDirectory() as folder:
        both = commands(Path(folder), chosen.workers)
        for _ in range(chosen.repeats):
            for name, command in both.items():
                times[name].append(measure(command, folder))
    for index, what in enumerate(("to the first step", "to the end")):
        ours, theirs = (sorted(pair[index] for pair in times[name]) for name in ("syncline", "torchrun"))
        middle, other = statistics.median(ours), statistics.median(theirs)
        print(
            f"{what:18} syncline {middle:.2f} s ({ours[0]:.2f}-{ours[-1]:.2f})  "
            f"torchrun {other:.2f} s ({theirs[0]:.2f}-{theirs[-1]:.2f})  ratio {middle / other:.2f}"
        )


if __name__ == "__main__":
    main()
