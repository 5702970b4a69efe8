"""Soak of method ahead: 2,000 steps with random delays end where bucketed with the same layout ends, to the bit.

python benchmarks/soak_ahead.py [STEPS]
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from test_ahead_traps import CHUNK_MB, Late, OneSize, batch, run, same_bits

from syncline.sync.ahead import Ahead


def main(steps: int) -> int:
    def soaked(sync: Any, _: nn.Module, module: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
        chance = random.Random(rank)
        for step in range(steps):
            time.sleep(chance.random() ** 8 * 0.02)
            module(batch(rank, step)).square().mean().backward()
            sync.finish_for_update()
            sync.update(optimizer)

    late = run(soaked, lambda comm: Ahead(Late(comm, random.Random(comm.rank)), chunk_mb=CHUNK_MB, barrier=False))
    equal = same_bits(late, run(soaked, OneSize))
    print(f"{steps} steps on 2 ranks: weights and optimiser state {'equal' if equal else 'DIFFER'} to the bit")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 2000))
