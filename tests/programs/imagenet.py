"""Image classification as public training scripts write it: residual blocks with batch norm, mixed precision with a
gradient scaler, a schedule, and a checkpoint from which all ranks resume halfway.

    torchrun --nproc-per-node 2 imagenet.py
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS, RESUME_AT = 20, 10


class Block(nn.Module):
    def __init__(self, inward, outward, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inward, outward, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outward)
        self.conv2 = nn.Conv2d(outward, outward, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outward)
        self.shortcut = nn.Conv2d(inward, outward, 1, stride, bias=False)

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 1, 1)
        self.layers = nn.Sequential(Block(8, 8, 1), Block(8, 16, 2))
        self.fc = nn.Linear(16, 10)

    def forward(self, x):
        return self.fc(self.layers(self.stem(x)).mean((2, 3)))


def build():
    torch.manual_seed(0)
    model = DDP(ResNet())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    return model, optimizer, scheduler, torch.amp.GradScaler("cpu")


def train():
    model, optimizer, scheduler, scaler = build()
    images = torch.Generator().manual_seed(100 + dist.get_rank())
    losses = []
    for step in range(STEPS):
        if step == RESUME_AT:
            saved = checkpoint(model, optimizer, scheduler, scaler)
            model, optimizer, scheduler, scaler = build()
            model.module.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            scheduler.load_state_dict(saved["scheduler"])
            scaler.load_state_dict(saved["scaler"])
        inputs = torch.randn(4, 3, 8, 8, generator=images)
        targets = torch.randint(10, (4,), generator=images)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        losses.append(loss.item())
    return losses, model.module.state_dict()


def checkpoint(model, optimizer, scheduler, scaler):
    """Rank 0 writes, everybody reads."""
    folder = [tempfile.mkdtemp(prefix="program-")]
    dist.broadcast_object_list(folder)
    path = Path(folder[0], "checkpoint.pt")
    parts = {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    if dist.get_rank() == 0:
        state = {name: part.state_dict() for name, part in parts.items()}
        torch.save({"model": model.module.state_dict(), **state}, path)
    dist.barrier()
    return torch.load(path, weights_only=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(train()[0])
    dist.destroy_process_group()
