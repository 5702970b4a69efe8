"""A plain training loop on one worker: python examples/plain_loop.py"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
labels = torch.randint(10, (2000,))
images = torch.randn(10, 3, 32, 32)[labels] + 3 * torch.randn(2000, 3, 32, 32)
dataset = TensorDataset(images, labels)

model = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(3600, 10))
loader = DataLoader(dataset, batch_size=100, shuffle=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

for epoch in range(3):
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"epoch {epoch}: loss {loss.item():.4f}")
