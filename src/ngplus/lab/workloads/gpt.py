"""A decoder-only Transformer with the layout of GPT-2."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Causal self-attention and a feed-forward network, each after a LayerNorm and added to its input."""

    def __init__(self, width: int, heads: int, dropout: float, bias: bool) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width, bias=bias), nn.LayerNorm(width, bias=bias)
        self.qkv, self.attention_out = nn.Linear(width, 3 * width, bias=bias), nn.Linear(width, width, bias=bias)
        self.up, self.down = nn.Linear(width, 4 * width, bias=bias), nn.Linear(4 * width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        x = x + F.dropout(self.attention_out(mixed.transpose(1, 2).flatten(2)), dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.mlp_norm(x)))), dropout)


class GPT(nn.Module):
    """Maps tokens [batch, length] to the logits of the next token, [batch, length, vocabulary].

    The output layer and the token embedding share one weight. Weights start from a normal distribution with standard
    deviation 0.02, those of the layers that add to the residual stream with 0.02 / sqrt(2 depth), as in GPT-2.
    """

    def __init__(
        self, vocabulary: int, context: int, width: int, heads: int, depth: int, dropout: float = 0.0, bias: bool = True
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout, bias) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width, bias=bias), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                residual = name.endswith(("attention_out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * depth) ** 0.5 if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        x = F.dropout(x, self.dropout if self.training else 0.0)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
