"""A Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU, as the published models have them, only smaller.

The defaults give 24 million parameters over a vocabulary of bytes, enough to be a real model and small enough for two CPU cores.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """The shape of a model."""

    vocab_size: int = 256
    dim: int = 512
    num_layers: int = 8
    num_heads: int = 8
    num_kv_heads: int = 4
    ffn_dim: int = 1408
    max_length: int = 256
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    dropout: float = 0.1


def rotary_table(head_dim: int, max_length: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, each `(max_length, head_dim / 2)`: one angle per position and pair of channels."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(max_length, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of channels of `x` (batch, heads, length, head_dim) by its position's angle."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class Attention(nn.Module):
    """Causal self-attention whose key and value heads are shared by groups of query heads."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.dim // config.num_heads
        self.wq = nn.Linear(config.dim, self.num_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, self.num_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, self.num_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(self.num_heads * self.head_dim, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.wq(x).view(batch, length, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(batch, length, self.num_kv_heads, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(batch, length, self.num_kv_heads, self.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        group = self.num_heads // self.num_kv_heads
        k, v = (tensor.unsqueeze(2).expand(-1, -1, group, -1, -1).flatten(1, 2) for tensor in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """One layer."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.ffn = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), cos, sin))
        return x + self.dropout(self.ffn(self.ffn_norm(x)))


class Llama(nn.Module):
    """Tokens (batch, length) to logits (batch, length, vocab_size)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        cos, sin = rotary_table(config.dim // config.num_heads, config.max_length, config.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def init_weights(self) -> None:
        """Draw every weight from torch's random state; projections back into the residual stream are drawn smaller."""
        deep = 0.02 / (2 * self.config.num_layers) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                nn.init.ones_(parameter)
            else:
                nn.init.normal_(parameter, std=deep if name.endswith(("wo.weight", "w2.weight")) else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))
