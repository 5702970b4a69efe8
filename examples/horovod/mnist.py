"""Train a small classifier with Horovod's API: sharded data, scaled learning rate, metrics averaged over ranks.

python -m syncline.horovod.install
horovodrun -np 2 python examples/horovod/mnist.py
"""

import argparse

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from digits import digits, network
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=24)
parser.add_argument("--lr", type=float, default=0.02)
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
args = parser.parse_args()


def metric_average(value, name):
    return hvd.allreduce(torch.tensor(value), name=name).item()


def train(epoch):
    model.train()
    train_sampler.set_epoch(epoch)
    for data, target in train_loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
    return loss.item()


def test(epoch):
    model.eval()
    loss, correct = 0.0, 0.0
    with torch.no_grad():
        for data, target in test_loader:
            output = model(data)
            loss += F.cross_entropy(output, target, reduction="sum").item()
            correct += (output.argmax(1) == target).sum().item()
    # Not the whole data set: this rank's part of it.
    loss = metric_average(loss / len(test_sampler), "avg_loss")
    accuracy = metric_average(correct / len(test_sampler), "avg_accuracy")
    if hvd.rank() == 0:
        print(f"epoch {epoch}: test loss {loss:.4f}, accuracy {100 * accuracy:.2f}%", flush=True)


hvd.init()
torch.manual_seed(42)
train_set, test_set = digits(720, seed=1), digits(240, seed=2)
train_sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank())
train_loader = DataLoader(train_set, args.batch_size, sampler=train_sampler)
test_sampler = DistributedSampler(test_set, num_replicas=hvd.size(), rank=hvd.rank())
test_loader = DataLoader(test_set, 120, sampler=test_sampler)

model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.5)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
    op=hvd.Average,
    gradient_predivide_factor=args.gradient_predivide_factor,
)
for epoch in range(1, args.epochs + 1):
    train(epoch)
    test(epoch)
