"""BERT (Devlin et al. 2018) with the head that guesses masked tokens; `small` is the one of Turc et al. 2019.

Takes token numbers [texts, places] and returns a weight for every token of the vocabulary at every place. The head
shares its matrix with the embedding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, scaled_dot_product_attention

LONGEST = 512
"""Places that have an embedding."""
VOCABULARY = 30_522
"""Of the published models; a text file of one's own has another."""


class Attention(nn.Module):
    """Every place looks at every other place, in several heads."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.num_heads = num_heads
        self.dropout = nn.Dropout(dropout)

    def forward(self, values: Tensor) -> Tensor:
        query, key, value = (self._split(layer(values)) for layer in (self.query, self.key, self.value))
        dropout = self.dropout.p if self.dropout.training else 0.0  # a layer, so that it can be found and turned off
        mixed = scaled_dot_product_attention(query, key, value, dropout_p=dropout)
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result

    def _split(self, values: Tensor) -> Tensor:
        texts, places, width = values.shape
        return values.view(texts, places, self.num_heads, width // self.num_heads).transpose(1, 2)


class Layer(nn.Module):
    """Attention and two linear layers, each added to its input and normalised."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(width, num_heads, dropout)
        self.attention_norm = nn.LayerNorm(width, eps=1e-12)
        self.inner = nn.Linear(width, 4 * width)
        self.outer = nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.dropout = nn.Dropout(dropout)

    def forward(self, values: Tensor) -> Tensor:
        values = self.attention_norm(values + self.dropout(self.attention(values)))
        result: Tensor = self.norm(values + self.dropout(self.outer(gelu(self.inner(values)))))
        return result


class Bert(nn.Module):
    def __init__(self, vocabulary: int, *, num_layers: int, width: int, num_heads: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(LONGEST, width)
        self.segments = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.Sequential(*[Layer(width, num_heads, dropout) for _ in range(num_layers)])
        self.head = nn.Linear(width, width)
        self.head_norm = nn.LayerNorm(width, eps=1e-12)
        self.head_bias = nn.Parameter(torch.zeros(vocabulary))
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        # One text per sample, so all places belong to the first of the two segments.
        embedded = self.tokens(tokens) + self.places.weight[: tokens.shape[1]] + self.segments.weight[0]
        values = self.layers(self.dropout(self.norm(embedded)))
        values = self.head_norm(gelu(self.head(values)))
        return linear(values, self.tokens.weight, self.head_bias)


def bert_base(num_classes: int = VOCABULARY) -> nn.Module:
    """12 layers, 109,514,298 parameters with the published vocabulary."""
    return Bert(num_classes, num_layers=12, width=768, num_heads=12)


def bert_small(num_classes: int = VOCABULARY) -> nn.Module:
    """4 layers, 28,795,194 parameters with the published vocabulary."""
    return Bert(num_classes, num_layers=4, width=512, num_heads=8)
