"""An encoder with heads that not every step and not every rank uses, and one that nobody uses: pre-training tasks
take turns, and ranks are at different ones.

    torchrun --nproc-per-node 2 bert.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS, VOCABULARY, WIDTH = 20, 29, 16


class Bert(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)
        self.pooler = nn.Linear(WIDTH, WIDTH)
        self.next_sentence = nn.Linear(WIDTH, 2)
        self.masked_words = nn.Linear(WIDTH, VOCABULARY)
        self.answer_span = nn.Linear(WIDTH, 2)

    def forward(self, tokens, task):
        hidden = self.encoder(self.embeddings(tokens))
        if task == "masked words":
            return {"logits": self.masked_words(hidden)}
        return {"logits": self.next_sentence(torch.tanh(self.pooler(hidden[:, 0])))}


def train():
    torch.manual_seed(0)
    model = DDP(Bert(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    stream = torch.Generator().manual_seed(30 + dist.get_rank())
    losses = []
    for step in range(STEPS):
        # Five steps at the same task, five at different ones.
        number = step + dist.get_rank() if step % 10 >= 5 else step
        task = ("masked words", "next sentence")[number % 2]
        tokens = torch.randint(VOCABULARY, (4, 6), generator=stream)
        logits = model(tokens, task=task)["logits"]
        targets = torch.randint(logits.shape[-1], logits.shape[:-1], generator=stream)
        loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.module.state_dict()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(train()[0])
    dist.destroy_process_group()
