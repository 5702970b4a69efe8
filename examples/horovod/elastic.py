"""Training that goes on when a rank dies: from the last commit, in the memory of the ranks that live.

horovodrun -np 3 --min-np 2 python examples/horovod/elastic.py
"""

import argparse

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from digits import digits, network
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=24)
parser.add_argument("--base-lr", type=float, default=0.02)
parser.add_argument("--batches-per-commit", type=int, default=5)
args = parser.parse_args()

hvd.init()
torch.manual_seed(42)
model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=args.base_lr * hvd.size(), momentum=0.5)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
train_set = digits(720, seed=1)
sampler = hvd.elastic.ElasticSampler(train_set)
train_loader = DataLoader(train_set, args.batch_size, sampler=sampler)


@hvd.elastic.run
def train(state):
    while state.epoch < args.epochs:
        model.train()
        for data, target in train_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), target)
            loss.backward()
            optimizer.step()
            state.sampler.record_batch(state.batch, args.batch_size)
            state.batch += 1
            state.loss += loss.item()
            if state.batch % args.batches_per_commit == 0:
                state.commit()
        loss = hvd.allreduce(torch.tensor(state.loss / state.batch), name="loss").item()
        if hvd.rank() == 0:
            print(f"epoch {state.epoch + 1}: loss {loss:.4f} on {hvd.size()} ranks", flush=True)
        state.epoch, state.batch, state.loss = state.epoch + 1, 0, 0.0
        state.sampler.set_epoch(state.epoch)
        state.commit()


def on_state_reset():
    for group in optimizer.param_groups:
        group["lr"] = args.base_lr * hvd.size()


state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, batch=0, loss=0.0)
state.register_reset_callbacks([on_state_reset])
train(state)
