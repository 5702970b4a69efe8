"""Runs every program of this folder with torch's class and then with ours in its place, one line swapped, and writes
how far losses and weights lie apart: one file for each rank in the folder that it is given.

    torchrun --nproc-per-node 2 side_by_side.py FOLDER
"""

from __future__ import annotations

import json
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

HERE = Path(__file__).parent
PROGRAMS = ("imagenet", "nanogpt", "gan", "ema", "bert", "sparse", "uneven")
METHODS = ("bucketed", "shared-memory", "all-reduce", "auto")
LINE = "from torch.nn.parallel import DistributedDataParallel as DDP\n"
SWAPPED = "import functools, syncline; DDP = functools.partial(syncline.DataParallel, method={method!r})\n"

Trained = tuple[list[float], dict[str, Tensor]]


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    found = {name: compared(name) for name in sys.argv[2:] or PROGRAMS}
    Path(sys.argv[1], f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def compared(name: str) -> dict[str, Any]:
    """By method: the largest differences, or what went wrong."""
    # Where ranks divide by 3, sums differ in the last digits, and training lets these grow: in float64 they stay
    # small. Only 16-bit compute needs float32.
    is_exact = dist.get_world_size() == 2
    torch.set_default_dtype(torch.float32 if is_exact or name == "imagenet" else torch.float64)
    losses, weights = train(name, None)
    found = {}
    for method in METHODS:
        try:
            own_losses, own_weights = train(name, method)
            found[method] = {
                "steps": len(losses), "loss": losses[-1],
                "losses": apart(torch.tensor(own_losses), torch.tensor(losses)),
                "weights": max(apart(own_weights[key], weights[key]) for key in weights),
                "same names": list(own_weights) == list(weights),
            }  # fmt: skip
        except Exception:
            found[method] = {"error": traceback.format_exc()}
    return found


def train(name: str, method: str | None) -> Trained:
    source = (HERE / f"{name}.py").read_text()
    assert source.count(LINE) == 1
    if method is not None:
        source = source.replace(LINE, SWAPPED.format(method=method))
    program: dict[str, Any] = {"__name__": name}
    exec(compile(source, f"{name} with {method}", "exec"), program)
    trained: Trained = program["train"]()
    return trained


def apart(found: Tensor, expected: Tensor) -> float:
    """The largest difference, as a share of the largest value."""
    difference = (found.double() - expected.double()).abs().max()
    return float(difference / expected.double().abs().max().clamp(min=1e-12))


if __name__ == "__main__":
    main()
