"""Train with a learning rate that warms up, and go on from the last checkpoint, which rank 0 alone reads and writes.

horovodrun -np 2 python examples/horovod/imagenet.py --checkpoint-format 'checkpoint-{epoch}.pt'
"""

import argparse
import os

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from digits import digits, network
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint-format", default="./checkpoint-{epoch}.pt")
parser.add_argument("--batch-size", type=int, default=20)
parser.add_argument("--batches-per-allreduce", type=int, default=2)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--base-lr", type=float, default=0.0125)
parser.add_argument("--warmup-epochs", type=float, default=2)
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--wd", type=float, default=0.00005)
args = parser.parse_args()

hvd.init()
torch.manual_seed(42)
allreduce_batch_size = args.batch_size * args.batches_per_allreduce

# Rank 0 looks for the newest checkpoint and tells the others.
resume_from_epoch = 0
for epoch in range(args.epochs, 0, -1):
    if os.path.exists(args.checkpoint_format.format(epoch=epoch)):
        resume_from_epoch = epoch
        break
resume_from_epoch = hvd.broadcast(torch.tensor(resume_from_epoch), root_rank=0, name="resume_from_epoch").item()

train_set = digits(720, seed=1)
train_sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank())
train_loader = DataLoader(train_set, allreduce_batch_size, sampler=train_sampler)
model = network()
optimizer = torch.optim.SGD(
    model.parameters(),
    lr=args.base_lr * args.batches_per_allreduce * hvd.size(),
    momentum=args.momentum,
    weight_decay=args.wd,
)
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.fp16,
    backward_passes_per_step=args.batches_per_allreduce,
)
if resume_from_epoch > 0 and hvd.rank() == 0:
    checkpoint = torch.load(args.checkpoint_format.format(epoch=resume_from_epoch))
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)


class Metric:
    """A mean over batches and over ranks."""

    def __init__(self, name):
        self.name, self.sum, self.count = name, 0.0, 0

    def update(self, value):
        self.sum += hvd.allreduce(value.detach(), name=self.name)
        self.count += 1

    @property
    def avg(self):
        return self.sum / self.count


def adjust_learning_rate(epoch, batch):
    """From the rate of one rank to that of all, little by little."""
    if epoch < args.warmup_epochs:
        progress = (epoch + float(batch + 1) / len(train_loader)) / args.warmup_epochs
        scale = (progress * (hvd.size() - 1) + 1) / hvd.size()
    else:
        scale = 1.0
    for group in optimizer.param_groups:
        group["lr"] = args.base_lr * hvd.size() * args.batches_per_allreduce * scale


for epoch in range(resume_from_epoch, args.epochs):
    model.train()
    train_sampler.set_epoch(epoch)
    train_loss, train_accuracy = Metric("train_loss"), Metric("train_accuracy")
    for batch, (data, target) in enumerate(train_loader):
        adjust_learning_rate(epoch, batch)
        optimizer.zero_grad()
        for start in range(0, len(data), args.batch_size):
            part = slice(start, start + args.batch_size)
            output = model(data[part])
            train_accuracy.update((output.argmax(1) == target[part]).float().mean())
            loss = F.cross_entropy(output, target[part])
            train_loss.update(loss)
            # A mean over the batches of one update.
            loss.div_(-(-len(data) // args.batch_size))
            loss.backward()
        optimizer.step()
    if hvd.rank() == 0:
        print(f"epoch {epoch + 1}: loss {train_loss.avg:.4f}, accuracy {100 * train_accuracy.avg:.2f}%", flush=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, args.checkpoint_format.format(epoch=epoch + 1))
