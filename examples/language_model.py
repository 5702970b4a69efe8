"""The same model on many workers: syncline launch examples/language_model.py --workers 2

Also: torchrun --nproc-per-node 2 examples/language_model.py, and with the same options (after `--` for syncline
launch). --batch is the number of windows of all workers together, and a run that goes on from a checkpoint equals an
uninterrupted one to the last bit.
"""

import argparse
import random
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import syncline

parser = argparse.ArgumentParser()
parser.add_argument("--text", type=Path, help="a file to learn; by default, a text is made up")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--stop-after", type=int, help="stop after so many epochs; go on with --checkpoint")
parser.add_argument("--batch", type=int, default=32, help="windows of 64 bytes per step")
parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate")
parser.add_argument("--bf16", action="store_true", help="compute in 16 bits")
parser.add_argument("--clip-norm", type=float, help="scale longer gradients down to this norm")
parser.add_argument("--checkpoint", type=Path, help="save each epoch here, and go on from it if it exists")
chosen = parser.parse_args()

LENGTH, WIDTH = 64, 64


def made_up_text() -> bytes:
    draw, words = random.Random(0), ("the", "a", "red", "old", "cat", "dog", "saw", "heard", "and", "near", "under")
    return ". ".join(" ".join(draw.choices(words, k=6)) for _ in range(600)).encode()


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        past_only = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        return self.head(self.layers(self.embedding(tokens) + self.places, mask=past_only, is_causal=True))


torch.manual_seed(0)
text = torch.tensor(list(chosen.text.read_bytes() if chosen.text else made_up_text()))
windows = text[: (len(text) - 1) // LENGTH * LENGTH + 1].unfold(0, LENGTH + 1, LENGTH)
dataset = TensorDataset(windows[:, :-1], windows[:, 1:])

model = LanguageModel()
model = syncline.DataParallel(model, method="auto")
loader = syncline.loader(dataset, global_batch=chosen.batch)
decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=chosen.rate)
total = chosen.epochs * len(loader)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, chosen.rate, total_steps=total, pct_start=0.1)

first = 0
if chosen.checkpoint and chosen.checkpoint.exists():
    saved = syncline.load(chosen.checkpoint, model, optimizer, scheduler, loader)
    first = saved["epoch"] + 1

for epoch in range(first, chosen.stop_after or chosen.epochs):
    for x, y in loader:
        with torch.autocast("cpu", torch.bfloat16, enabled=chosen.bf16):
            loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        if chosen.clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), chosen.clip_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        loss = syncline.mean(loss)  # over the global batch; without it, the loss is that of the rank's own samples
    if model.rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")
    if chosen.checkpoint:
        syncline.save(chosen.checkpoint, model, optimizer, scheduler, loader, epoch=epoch)
