"""What several tests share: one tolerance check that names its quantity, and a toy transformer with sites."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def assert_close(actual: Tensor, expected: Tensor, *, rms: float, max: float, what: str) -> None:
    """Relative RMS error at most `rms`, largest error at most `max` * max |expected|; NaN never passes."""
    actual, expected = actual.double(), expected.double()
    assert actual.shape == expected.shape, f"{what}: shape {list(actual.shape)}, expected {list(expected.shape)}"
    assert torch.isfinite(actual).all(), f"{what}: not finite"
    if expected.numel() == 0:
        return
    error = actual - expected
    scale = expected.abs().max().clamp(min=1e-300)
    rel_rms = float(error.norm() / expected.norm().clamp(min=1e-300))
    rel_max = float(error.abs().max() / scale)
    assert rel_rms <= rms, f"{what}: relative RMS error {rel_rms:.3e} > {rms:.1e}"
    assert rel_max <= max, f"{what}: largest relative error {rel_max:.3e} > {max:.1e}"


class ToyAttention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.norm_q, self.norm_k = nn.RMSNorm(dim, eps=1e-6), nn.RMSNorm(dim, eps=1e-6)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        q, k, v = self.norm_q(self.q(x)), self.norm_k(self.k(context)), self.v(context)
        return self.o(nn.functional.scaled_dot_product_attention(q, k, v))


class ToyBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.self_attn, self.cross_attn = ToyAttention(dim), ToyAttention(dim)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + self.self_attn(h, h)
        return x + self.cross_attn(self.norm2(x), context)


class ToyModel(nn.Module):
    """Matrix-Game's names at toy size: `blocks.N.{self_attn,cross_attn}.{q,k,v,o}`, q/k norms, seeded weights."""

    def __init__(self, dim: int = 48, blocks: int = 2, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(ToyBlock(dim) for _ in range(blocks))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, context)
        return x
