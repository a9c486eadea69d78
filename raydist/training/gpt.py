"""A language model of 1 M to 8 B parameters. (rank side)

It has RMSNorm, rotary positions, grouped queries and SwiGLU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raydist.training.flops import flops_per_token


@dataclass(frozen=True)
class Shape:
    """The dimensions of a model size."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    """Heads of keys and values; each serves several heads of queries (Ainslie et al. 2023,
    arXiv:2305.13245)."""
    hidden: int
    """Inner width of the feed-forward layer."""
    theta: float = 10_000.0
    """Base of the rotary positions' wave lengths (Su et al. 2021, arXiv:2104.09864)."""


SIZES = {
    "1m": Shape(6, 128, 4, 2, 352),
    "10m": Shape(8, 320, 5, 5, 864),
    "30m": Shape(12, 448, 7, 7, 1216),
    "100m": Shape(14, 768, 12, 4, 2048),
    "300m": Shape(24, 1024, 16, 8, 2816),
    "1b": Shape(16, 2048, 32, 8, 8192, 500_000.0),
    "3b": Shape(28, 3072, 24, 8, 8192, 500_000.0),
    "8b": Shape(32, 4096, 32, 8, 14336, 500_000.0),
}
"""The sizes by `model.size`. Those from 1b are the shapes of Llama 3 (arXiv:2407.21783), which
reach the number of parameters in their names with its 128,256 tokens; with bytes they have 0.3 B
to 1 B parameters less."""


SPREAD = 0.02
"""Standard deviation of the initial weights (Radford et al. 2019)."""


class Attention(nn.Module):
    """Causal self-attention: [B, T, width] -> [B, T, width]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.theta = shape.theta
        self.head = shape.width // shape.heads
        self.query = nn.Linear(shape.width, shape.heads * self.head, bias=False)
        self.key = nn.Linear(shape.width, shape.kv_heads * self.head, bias=False)
        self.value = nn.Linear(shape.width, shape.kv_heads * self.head, bias=False)
        self.out = nn.Linear(shape.heads * self.head, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # the number of heads is left open, because under tensor parallelism this rank has only a
        # part of them
        query, key, value = (
            part(x).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        cos, sin = turns(x.shape[1], self.head, self.theta, x.device)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


def turns(length: int, head: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the cosine and sine of each position's angle for each pair of values of a head.

    Both are of shape [T, head / 2].
    """
    half = head // 2
    waves = theta ** (-torch.arange(half, device=device, dtype=torch.float32) / half)
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), waves)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair of values of a head by an angle that grows with the position.

    [B, heads, T, head] -> the same.
    """
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202): [B, T, width] -> [B, T, width]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """One layer: attention, then the feed-forward layer, each added to its input."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.layers = shape.layers
        self.attention_norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.attention = Attention(shape)
        self.feed_forward_norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.feed_forward = FeedForward(shape)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights, as GPT-2 does.

        Where the output is added to the input, the weights are smaller the more layers there are.
        """
        added = (self.attention.out, self.feed_forward.down)
        for layer in (each for each in self.modules() if isinstance(each, nn.Linear)):
            nn.init.normal_(
                layer.weight, std=SPREAD / (2 * self.layers) ** 0.5 if layer in added else SPREAD
            )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out


class GPT(nn.Module):
    """A language model: tokens [B, T] below `vocab` -> scores of the next token, [B, T, vocab].

    - `size`: 1m to 8b, as `model.size` (docs/parallel.md lists them).
    - `vocab`: number of tokens; 256 for bytes.
    - `tied`: the last layer has the weights of the embedding.
    - `changes`: dimensions that replace those of the size: `model.layers=2 model.width=64`, as in
      Shape.
    """

    tp_plan: ClassVar = {
        "blocks.*.attention.query": "colwise",
        "blocks.*.attention.key": "colwise",
        "blocks.*.attention.value": "colwise",
        "blocks.*.attention.out": "rowwise",
        "blocks.*.feed_forward.gate": "colwise",
        "blocks.*.feed_forward.up": "colwise",
        "blocks.*.feed_forward.down": "rowwise",
    }

    def __init__(
        self, size: str = "1m", vocab: int = 256, tied: bool = True, **changes: float
    ) -> None:
        super().__init__()
        if size not in SIZES:
            raise ValueError(f"model.size={size} is none of {', '.join(SIZES)}")
        shape = replace(SIZES[size], **changes)  # type: ignore[arg-type]
        if shape.width % (2 * shape.heads) or shape.heads % shape.kv_heads:
            raise ValueError(
                f"{shape}: width must be a multiple of 2 x heads, and heads one of kv_heads"
            )
        self.shape = shape
        self.embedding = nn.Embedding(vocab, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.head = None if tied else nn.Linear(shape.width, vocab, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new values for the parameters outside of the blocks."""
        nn.init.normal_(self.embedding.weight, std=SPREAD)
        if self.head is not None:
            nn.init.normal_(self.head.weight, std=SPREAD)

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding, as Hugging Face's models do."""
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        """Return what has the weights of the last layer: the embedding, if they are tied."""
        return self.embedding if self.head is None else self.head

    def flops_per_token(self, context: int) -> int:
        """Return the operations of the forward and backward pass for one of `context` tokens."""
        unused = 0 if self.head is None else self.embedding.weight.numel()
        multiplied = sum(each.numel() for each in self.parameters()) - unused
        return flops_per_token(multiplied, self.shape.layers, self.shape.width, context)

    def example(self, samples: int, context: int = 128) -> Tensor:
        """Return an input of this many samples, for the plan's memory."""
        return torch.zeros(samples, context, dtype=torch.uint8)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens.long())
        for block in self.blocks:
            x = block(x)
        return self.scores(self.norm(x))

    def scores(self, x: Tensor) -> Tensor:
        """Return the scores of the next token: [B, T, width] -> [B, T, vocab]."""
        scores: Tensor = F.linear(x, self.embedding.weight) if self.head is None else self.head(x)
        return scores
