"""One small byte-level transformer, and the asynchronous update that the nodes share.

The shared state is one flat vector of parameters in shared memory. A node copies it into its own replica,
computes a gradient there, and adds the scaled gradient back. Nodes do not wait for each other: a gradient is
as old as the batch took, and two additions that overlap may lose a little of each other. That is asynchronous
SGD in its plainest form, enough to see a loss fall; it belongs to the demo and is no feature of the library.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

PEAK_RATE = 0.2
LARGEST_NORM = 1.0


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each normalised first and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """`[rows, places, width]` to the same."""
        rows, places, width = x.shape
        qkv: Tensor = self.qkv(self.norm1(x)).view(rows, places, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, places, width))
        changed: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return changed


class ByteModel(nn.Module):
    """Predicts the next byte."""

    def __init__(self, context: int, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)

    def forward(self, x: Tensor) -> Tensor:
        """Bytes `[rows, places]` to logits `[rows, places, 256]`."""
        hidden = self.bytes(x) + self.places.weight[: x.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(hidden)))
        return logits


def learning_rate(step: int, steps: int) -> float:
    """Return the rate of a dataset step: up over the first twentieth, then down to a tenth.

    The step is the data's own, so the rate is right whoever trains the batch and whenever.
    """
    return PEAK_RATE * min(1.0, (step + 1) / max(1.0, steps / 20)) * (1.0 - 0.9 * step / steps)


class Replica:
    """A node's own copy of the model, over one flat vector of parameters and one of gradients."""

    def __init__(self, context: int) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self._model = ByteModel(context)
        parameters = list(self._model.parameters())
        self.values = nn.utils.parameters_to_vector(parameters).detach().clone()
        self._gradient = torch.zeros_like(self.values)
        place = 0
        for parameter in parameters:
            here = slice(place, place + parameter.numel())
            parameter.data = self.values[here].view_as(parameter)
            parameter.grad = self._gradient[here].view_as(parameter)
            place = here.stop

    def copy_in(self, shared: Tensor) -> None:
        """Take the parameters as they are now."""
        self.values.copy_(shared)

    def compute(self, batch: Tensor) -> float:
        """Compute the gradient of one batch of rows, its norm at most `LARGEST_NORM`, and return the loss."""
        self._gradient.zero_()
        loss = self._loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = self._gradient.norm().item()
        if norm > LARGEST_NORM:
            self._gradient.mul_(LARGEST_NORM / norm)
        return loss.item()

    def add_out(self, shared: Tensor, rate: float) -> None:
        """Take a step of `rate` along the last gradient, in the parameters everybody sees."""
        shared.add_(self._gradient, alpha=-rate)

    @torch.no_grad()
    def loss(self, batch: Tensor) -> float:
        """Return the loss of a batch of rows, in nats a byte."""
        return self._loss(batch).item()

    def _loss(self, batch: Tensor) -> Tensor:
        logits = self._model(batch[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
