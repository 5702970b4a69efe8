"""A language model as nanoGPT trains it: tied weights, gradients accumulated over micro-batches with the switch
`require_backward_grad_sync`, clipping, warm-up, and an evaluation on rank 0 alone.

    torchrun --nproc-per-node 2 nanogpt.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS, ACCUMULATE, WARMUP = 20, 3, 5
VOCABULARY, LENGTH, WIDTH = 31, 8, 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        q, k, v = (
            part.view(*part.shape[:2], 2, -1).transpose(1, 2)
            for part in self.c_attn(self.ln_1(x)).split(WIDTH, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(2))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens, targets=None):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def get_batch(stream):
    text = torch.randint(VOCABULARY, (4, LENGTH + 1), generator=stream)
    return text[:, :-1], text[:, 1:]


@torch.no_grad()
def estimate_loss(model):
    stream = torch.Generator().manual_seed(7)
    model.eval()
    loss = torch.stack([model(*get_batch(stream))[1] for _ in range(2)]).mean()
    model.train()
    return loss.item()


def train():
    torch.manual_seed(1337)
    model = DDP(GPT())
    optimizer = torch.optim.AdamW(model.module.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    stream = torch.Generator().manual_seed(1337 + dist.get_rank())
    losses = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1.0, (step + 1) / WARMUP)
        if step % 10 == 0 and dist.get_rank() == 0:
            losses.append(estimate_loss(model))
        for micro_step in range(ACCUMULATE):
            model.require_backward_grad_sync = micro_step == ACCUMULATE - 1
            _, loss = model(*get_batch(stream))
            loss = loss / ACCUMULATE
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item() * ACCUMULATE)
    return losses, model.module.state_dict()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(train()[0])
    dist.destroy_process_group()
