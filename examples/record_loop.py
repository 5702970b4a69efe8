"""Where does the time of my own loop go? python examples/record_loop.py

Also on many workers: torchrun --nproc-per-node 2 examples/record_loop.py
Then: syncline explain my-run
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import syncline

torch.manual_seed(0)
labels = torch.randint(10, (2000,))
images = torch.randn(10, 3, 32, 32)[labels] + 3 * torch.randn(2000, 3, 32, 32)
dataset = TensorDataset(images, labels)

model = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(3600, 10))
model = syncline.DataParallel(model, method="auto")
loader = syncline.loader(dataset, global_batch=100)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

with syncline.record(model, optimizer, "my-run"):
    for epoch in range(3):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if model.rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f} on rank 0's shard")
