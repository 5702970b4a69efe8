"""Ranks with different numbers of batches: `join` lets those that are done keep the others company.

torchrun --nproc-per-node 2 uneven.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

EPOCHS, STEPS = 2, 10


def train():
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(5, 10), nn.Tanh(), nn.Linear(10, 3)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    stream = torch.Generator().manual_seed(50 + dist.get_rank())
    losses = []
    for _ in range(EPOCHS):
        batches = STEPS - 3 * dist.get_rank()
        with model.join():
            for _ in range(batches):
                inputs, targets = torch.randn(4, 5, generator=stream), torch.randint(3, (4,), generator=stream)
                loss = F.cross_entropy(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
    return losses, model.module.state_dict()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(train()[0])
    dist.destroy_process_group()
