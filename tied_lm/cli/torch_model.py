"""The tied model in PyTorch, for the benchmark: its training step, alone or around the same Transformer."""

import os
from collections.abc import Callable

import numpy as np
import torch
from torch.nn import functional as F


class Block(torch.nn.Module):
    """As `tied_lm.model.bodies.TransformerBlock`, with one product for query, key and value."""

    def __init__(self, features: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(features, eps=1e-6) for _ in range(2))
        self.qkv, self.out, self.up, self.down = (
            torch.nn.Linear(rows, columns, bias=False)
            for rows, columns in (
                (features, 3 * features),
                (features, features),
                (features, 4 * features),
                (4 * features, features),
            )
        )

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length = x.shape[:2]
        qkv = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        real, imaginary = qkv[:2].chunk(2, dim=-1)
        q, k = torch.cat([real * cos - imaginary * sin, real * sin + imaginary * cos], dim=-1).to(qkv.dtype)
        attended = F.scaled_dot_product_attention(q, k, qkv[2], is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh"))


class Model(torch.nn.Module):
    """A tied model with no body, or with `layers` blocks and a last norm."""

    def __init__(self, weight: np.ndarray, layers: int, heads: int, length: int):
        super().__init__()
        features = weight.shape[1]
        self.weight = torch.nn.Parameter(torch.tensor(weight))
        self.blocks = torch.nn.ModuleList(Block(features, heads) for _ in range(layers))
        self.norm = torch.nn.RMSNorm(features, eps=1e-6) if layers else torch.nn.Identity()
        width = features // heads
        angle = torch.arange(length)[:, None] * 10_000.0 ** (-torch.arange(0, width, 2) / width)
        self.cos, self.sin = angle.cos(), angle.sin()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.embedding(x, self.weight)
        for block in self.blocks:
            h = block(h, self.cos, self.sin)
        return self.norm(h) @ self.weight.T


def torch_step(
    weight: np.ndarray, inputs: np.ndarray, targets: np.ndarray, layers: int, heads: int, autocast: bool
) -> Callable[[], None]:
    """A whole training step, with PyTorch's fused Adam. Inputs and targets are (B, L)."""
    torch.set_num_threads(os.cpu_count() or 1)
    model = Model(weight, layers, heads, inputs.shape[1])
    x, y = (torch.tensor(ids, dtype=torch.long) for ids in (inputs, targets))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)

    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        loss.item()

    return run
