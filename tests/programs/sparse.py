"""A recommender: large tables with sparse gradients and an optimiser of their own beside dense layers.

torchrun --nproc-per-node 2 sparse.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS, USERS, ITEMS = 20, 50, 40


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.users = nn.Embedding(USERS, 8, sparse=True)
        self.items = nn.EmbeddingBag(ITEMS, 8, mode="sum", sparse=True)
        self.top = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, users, items):
        return self.top(torch.cat([self.users(users), self.items(items)], dim=1)).squeeze(1)


def train():
    torch.manual_seed(0)
    model = DDP(Recommender())
    tables = [model.module.users.weight, model.module.items.weight]
    optimizers = [
        torch.optim.SparseAdam(tables, lr=1e-2),
        torch.optim.Adam(model.module.top.parameters(), lr=1e-2),
    ]
    stream = torch.Generator().manual_seed(40 + dist.get_rank())
    losses = []
    for _ in range(STEPS):
        users = torch.randint(USERS, (6,), generator=stream)
        items = torch.randint(ITEMS, (6, 3), generator=stream)
        clicked = torch.randint(2, (6,), generator=stream).to(torch.get_default_dtype())
        loss = F.binary_cross_entropy_with_logits(model(users, items), clicked)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return losses, model.module.state_dict()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(train()[0])
    dist.destroy_process_group()
