"""A generative adversarial network: two wrapped models that train in turns, and the discriminator is frozen while
the generator learns.

    torchrun --nproc-per-node 2 gan.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS = 20


def generator():
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))


def discriminator():
    return nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))


def set_requires_grad(network, value):
    for parameter in network.parameters():
        parameter.requires_grad_(value)


def train():
    torch.manual_seed(0)
    net_g, net_d = DDP(generator()), DDP(discriminator())
    optimizer_g = torch.optim.Adam(net_g.parameters(), lr=1e-2, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(net_d.parameters(), lr=1e-2, betas=(0.5, 0.999))
    stream = torch.Generator().manual_seed(10 + dist.get_rank())
    losses = []
    for _ in range(STEPS):
        noise = torch.randn(6, 4, generator=stream)
        samples = torch.randn(6, 8, generator=stream) + 1
        fake = net_g(noise)

        set_requires_grad(net_d, True)
        optimizer_d.zero_grad()
        verdict = net_d(torch.cat([samples, fake.detach()]))
        loss_d = F.binary_cross_entropy_with_logits(verdict, torch.cat([torch.ones(6, 1), torch.zeros(6, 1)]))
        loss_d.backward()
        optimizer_d.step()

        set_requires_grad(net_d, False)
        optimizer_g.zero_grad()
        loss_g = F.binary_cross_entropy_with_logits(net_d(fake), torch.ones(6, 1))
        loss_g.backward()
        optimizer_g.step()
        losses += [loss_d.item(), loss_g.item()]
    return losses, {**net_g.module.state_dict(prefix="g."), **net_d.module.state_dict(prefix="d.")}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(train()[0])
    dist.destroy_process_group()
