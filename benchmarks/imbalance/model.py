"""What the ranks of the imbalance benchmark train, and at what pace: a small decoder on made-up tokens.

A layer behind the embedding, the first one, notes when the backward pass comes to it. That is the end of a
micro-batch's computing: what follows is the embedding's own gradient and, in DistributedDataParallel, the wait for
the gradients of others, which so counts as idle. The same layer holds the backward pass up where a rank is to be
slower than its device. So a pause comes before that wait, as a slower device would.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.imbalance.settings import Sizes

SYMBOLS = 64
"""Of the vocabulary, so many tokens occur."""
NOISE = 0.1
"""The part of the tokens that do not follow from the one before."""
POOL = 2048
"""Sequences that differ."""
RATE = 0.5
"""The learning rate times the width."""


class Sequences(Dataset[Any]):
    """Sample n: its number, and the tokens of a sequence; the same in every process."""

    def __init__(self, samples: int, sizes: Sizes) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = min(samples, POOL), sizes.length + 1
        chance = torch.randint(SYMBOLS, shape, generator=generator)
        follows = torch.rand(shape, generator=generator) > NOISE
        for place in range(1, shape[1]):
            after = (7 * chance[:, place - 1] + 3) % SYMBOLS
            chance[:, place] = torch.where(follows[:, place], after, chance[:, place])
        self._pool, self._samples = chance, samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, number: int) -> tuple[int, Tensor]:
        return number, self._pool[number % len(self._pool)]


class _Hold(torch.autograd.Function):
    """Changes nothing, and calls a function when the backward pass comes by."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, hold: Callable[[], None]) -> Tensor:
        ctx.hold = hold
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.hold()
        return gradients[0], None


class _Block(nn.Module):
    """Causal attention, then a perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        rows, length, width = hidden.shape
        parts = self.attention(self.before(hidden)).view(rows, length, 3, self._heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(seen.transpose(1, 2).reshape(rows, length, width))
        changed: Tensor = self.perceptron(self.between(hidden))
        return hidden + changed


class Decoder(nn.Module):
    """Predicts each token from those before it; gives the mean loss of a batch of sequences."""

    def __init__(self, sizes: Sizes, hold: Callable[[], None]) -> None:
        super().__init__()
        self._hold = hold
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
            self.places = nn.Parameter(0.02 * torch.randn(sizes.length, sizes.width))
            self.blocks = nn.Sequential(*(_Block(sizes.width, sizes.heads) for _ in range(sizes.layers)))
            self.last = nn.Sequential(nn.LayerNorm(sizes.width), nn.Linear(sizes.width, sizes.vocabulary))

    def forward(self, tokens: Tensor) -> Tensor:
        """The mean loss of sequences, one token longer than the model sees."""
        hidden: Tensor = _Hold.apply(self.embedding(tokens[:, :-1]), self._hold)  # type: ignore[no-untyped-call]
        scores = self.last(self.blocks(hidden + self.places))
        return functional.cross_entropy(scores.flatten(0, 1).float(), tokens[:, 1:].flatten())


def optimizer_of(model: nn.Module, sizes: Sizes) -> torch.optim.Optimizer:
    """AdamW, at a rate that suits the width."""
    return torch.optim.AdamW(model.parameters(), lr=RATE / sizes.width)
