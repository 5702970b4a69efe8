"""Images per second on random data: gradients in 16 bits, several backward passes for each update.

horovodrun -np 2 python examples/horovod/synthetic_benchmark.py --fp16-allreduce --batches-per-allreduce 2
"""

import argparse
import timeit

import horovod.torch as hvd
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--batches-per-allreduce", type=int, default=1)
parser.add_argument("--num-warmup-batches", type=int, default=2)
parser.add_argument("--num-batches-per-iter", type=int, default=3)
parser.add_argument("--num-iters", type=int, default=3)
parser.add_argument("--use-adasum", action="store_true")
args = parser.parse_args()

hvd.init()
torch.manual_seed(1)
model = nn.Sequential(
    nn.Conv2d(3, 16, 3), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(16 * 7 * 7, 256), nn.ReLU(),
    nn.Linear(256, 10),
)  # fmt: skip
scale = hvd.local_size() if args.use_adasum else hvd.size() * args.batches_per_allreduce
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * scale)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
    backward_passes_per_step=args.batches_per_allreduce,
    op=hvd.Adasum if args.use_adasum else hvd.Average,
)
data = torch.randn(args.batches_per_allreduce * args.batch_size, 3, 32, 32)
target = torch.randint(10, (len(data),))


def benchmark_step():
    optimizer.zero_grad()
    for start in range(0, len(data), args.batch_size):
        part = slice(start, start + args.batch_size)
        loss = F.cross_entropy(model(data[part]), target[part]) / args.batches_per_allreduce
        loss.backward()
    optimizer.step()


def log(text):
    if hvd.rank() == 0:
        print(text, flush=True)


log(f"Batch size: {args.batch_size}, ranks: {hvd.size()}")
timeit.timeit(benchmark_step, number=args.num_warmup_batches)
rates = []
for number in range(args.num_iters):
    seconds = timeit.timeit(benchmark_step, number=args.num_batches_per_iter)
    rates.append(len(data) * args.num_batches_per_iter / seconds)
    log(f"Iter #{number}: {rates[-1]:.1f} img/sec per rank")
mean, spread = np.mean(rates), 1.96 * np.std(rates)
log(f"Total img/sec on {hvd.size()} rank(s): {hvd.size() * mean:.1f} +-{hvd.size() * spread:.1f}")
