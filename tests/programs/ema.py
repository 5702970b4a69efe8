"""A model and its moving averages: a deep copy that is updated by hand, torch's AveragedModel, and a whole model
that is saved and loaded again.

    torchrun --nproc-per-node 2 ema.py
"""

import copy
import io

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

STEPS, DECAY = 20, 0.9


def train():
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3)))
    ema = copy.deepcopy(model.module).requires_grad_(False)
    averaged = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    stream = torch.Generator().manual_seed(20 + dist.get_rank())
    losses = []
    for step in range(STEPS):
        inputs, targets = torch.randn(5, 6, generator=stream), torch.randint(3, (5,), generator=stream)
        loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for old, new in zip(ema.parameters(), model.module.parameters(), strict=True):
                old.lerp_(new, 1 - DECAY)
        averaged.update_parameters(model.module)
        losses.append(loss.item())
        if step % 5 == 4:
            losses += [evaluated(network, stream) for network in (ema, averaged, loaded(model.module))]
    weights = {**model.module.state_dict(), **ema.state_dict(prefix="ema."), **averaged.state_dict(prefix="swa.")}
    return losses, weights


@torch.no_grad()
def evaluated(network, stream):
    network.eval()
    inputs, targets = torch.randn(5, 6, generator=stream), torch.randint(3, (5,), generator=stream)
    loss = F.cross_entropy(network(inputs), targets)
    network.train()
    return loss.item()


def loaded(network):
    """As a checkpoint of a whole model."""
    file = io.BytesIO()
    torch.save(network, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(train()[0])
    dist.destroy_process_group()
