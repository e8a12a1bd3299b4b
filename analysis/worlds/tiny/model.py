"""TinyWorld's network: an action-conditioned video diffusion transformer in Matrix-Game-3.0's block layout.

Eight frames go in: four of context at timestep 0 and four noised ones at timestep t (0 clean, 1 noise). Out comes the
clean version of the noised four. Tokens are 8 x 8 patches. Each block is self-attention over all frames (3-D RoPE),
cross-attention to one token per action and a learned map token, and a feed-forward, modulated by each frame's timestep.
Module names are those of Matrix-Game-3.0: `blocks.N.{self_attn,cross_attn}.{q,k,v,o}`, `norm_q`, `norm_k`, `norm3`.

    model = TinyModel(TinyConfig())
    clean = model(frames, times, actions)  # [B, 8, 64, 96, 3], [B, 8], [B, 8, 3] -> [B, 4, 64, 96, 3]
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class TinyConfig:
    """Sizes. `height`, `width` and `patch` in pixels; frames are counted in 17.5ths of a second."""

    dim: int = 256
    blocks: int = 8
    heads: int = 4
    patch: int = 8
    height: int = 64
    width: int = 96
    context_frames: int = 4
    clip_frames: int = 4
    action_dim: int = 3

    def __post_init__(self) -> None:
        if self.dim % self.heads or (self.dim // self.heads) % 2:
            raise ValueError(f"dim {self.dim} must split into {self.heads} heads of an even size")
        if self.height % self.patch or self.width % self.patch:
            raise ValueError(f"patch {self.patch} must divide the frame, {self.width} x {self.height}")

    @property
    def frames(self) -> int:
        return self.context_frames + self.clip_frames

    @property
    def grid(self) -> tuple[int, int]:
        """Patches in a frame: rows, columns."""
        return self.height // self.patch, self.width // self.patch


def rope_tables(config: TinyConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines float32 [tokens, head_dim / 2] of 3-D RoPE: pairs are split over time, row and column."""
    half = config.dim // config.heads // 2
    spatial = half // 3  # pairs for rows, as many for columns, the rest for time, as in Wan
    sizes = (half - 2 * spatial, spatial, spatial)
    axes = torch.meshgrid(*(torch.arange(n) for n in (config.frames, *config.grid)), indexing="ij")
    angles = []
    for position, pairs in zip(axes, sizes, strict=True):
        frequency = 10000.0 ** (-torch.arange(pairs, dtype=torch.float64) / max(pairs, 1))
        angles.append(position.reshape(-1, 1).double() * frequency)
    angle = torch.cat(angles, dim=1)  # [tokens, head_dim / 2]
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on [..., tokens, head_dim]: neighbours (2i, 2i + 1) turn by the angle of pair i. Computed in float32."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x.dtype)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis, in float32."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight).to(x.dtype)


class Attention(nn.Module):
    """q, k, v, o with biases, q and k normed over the full width before they are split into heads."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, dim)
        self.v = nn.Linear(dim, dim)
        self.o = nn.Linear(dim, dim)
        self.norm_q = RMSNorm(dim)
        self.norm_k = RMSNorm(dim)

    def forward(self, x: Tensor, memory: Tensor, rope: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """[B, N, dim] attends to [B, M, dim] (for self-attention the same tensor) -> [B, N, dim]."""
        q = self.norm_q(self.q(x)).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [B, heads, N, head_dim]
        k = self.norm_k(self.k(memory)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        v = self.v(memory).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """AdaLN without weights: LayerNorm, then scale and shift per frame. x [B, F, P, dim], the others [B, F, 1, dim]."""
    return (F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift).to(x.dtype)


class Block(nn.Module):
    """Self-attention, cross-attention, feed-forward; the first and last gated and modulated per frame."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.self_attn = Attention(dim, heads)
        self.norm3 = nn.LayerNorm(dim)
        self.cross_attn = Attention(dim, heads)
        self.ffn = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(approximate="tanh"), nn.Linear(4 * dim, dim))
        self.modulation = nn.Parameter(torch.randn(6, dim) / dim**0.5)

    def forward(self, x: Tensor, time: Tensor, memory: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, F, P, dim], time [B, F, 6, dim], memory [B, M, dim] -> [B, F, P, dim]."""
        grid = x.shape[1:3]
        parts = (time + self.modulation).to(x.dtype).unsqueeze(3).unbind(2)  # six of [B, F, 1, dim]
        tokens = modulate(x, parts[0], parts[1]).flatten(1, 2)  # [B, N, dim]
        x = x + self.self_attn(tokens, tokens, (cos, sin)).unflatten(1, grid) * parts[2]
        tokens = self.norm3(x).to(x.dtype).flatten(1, 2)
        x = x + self.cross_attn(tokens, memory).unflatten(1, grid)
        return x + self.ffn(modulate(x, parts[3], parts[4])) * parts[5]


class TinyModel(nn.Module):
    """The whole network. Pixels are float in [-1, 1]; see the module docstring for shapes."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config = config
        dim, pixels = config.dim, 3 * config.patch**2
        self.patch_embedding = nn.Linear(pixels, dim)
        self.position = nn.Parameter(torch.randn(math.prod(config.grid), dim) * 0.02)
        self.frame = nn.Parameter(torch.randn(config.frames, dim) * 0.02)
        self.time_embedding = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim), nn.SiLU())
        self.time_projection = nn.Linear(dim, 6 * dim)
        self.action_embedding = nn.Sequential(nn.Linear(config.action_dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.action_frame = nn.Parameter(torch.randn(config.frames, dim) * 0.5)
        self.map_token = nn.Parameter(torch.randn(1, dim) * 0.5)
        self.blocks = nn.ModuleList(Block(dim, config.heads) for _ in range(config.blocks))
        self.head_modulation = nn.Parameter(torch.randn(2, dim) / dim**0.5)
        self.head = nn.Linear(dim, pixels)
        cos, sin = rope_tables(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.zeros_(self.head.weight)
        for module in (*self.time_embedding, self.time_projection):
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    def patchify(self, frames: Tensor) -> Tensor:
        """[B, F, H, W, 3] -> [B, F, P, 3 * patch * patch], patches in rows."""
        rows, columns = self.config.grid
        patches = frames.unflatten(2, (rows, -1)).unflatten(4, (columns, -1))  # [B, F, rows, p, columns, p, 3]
        return patches.transpose(3, 4).flatten(4).flatten(2, 3)

    def unpatchify(self, patches: Tensor) -> Tensor:
        """The inverse of `patchify`."""
        size = self.config.patch
        grid = patches.unflatten(2, self.config.grid).unflatten(4, (size, size, 3))  # [B, F, rows, columns, p, p, 3]
        return grid.transpose(3, 4).flatten(4, 5).flatten(2, 3)

    def time_features(self, times: Tensor) -> Tensor:
        """Sines and cosines of timesteps in [0, 1]: [B, F] -> [B, F, dim]."""
        half = self.config.dim // 2
        frequency = torch.exp(torch.arange(half, device=times.device) * (-math.log(10000.0) / half))
        angle = 1000.0 * times.float()[..., None] * frequency
        return torch.cat((angle.cos(), angle.sin()), dim=-1)

    def forward(self, frames: Tensor, times: Tensor, actions: Tensor) -> Tensor:
        """Frames float [B, F, H, W, 3] in [-1, 1], times [B, F], actions [B, F, A] -> clean clip [B, clip, H, W, 3].

        Raises ValueError when the frames do not have the configured shape.
        """
        config = self.config
        expected = (config.frames, config.height, config.width, 3)
        if tuple(frames.shape[1:]) != expected:
            raise ValueError(f"frames must be [B, {', '.join(map(str, expected))}], got {list(frames.shape)}")
        x = self.patch_embedding(self.patchify(frames))  # [B, F, P, dim]
        x = x + (self.position + self.frame[:, None]).to(x.dtype)
        embedded = self.time_embedding(self.time_features(times))  # [B, F, dim]
        time = self.time_projection(embedded).unflatten(-1, (6, -1))  # [B, F, 6, dim]
        told = self.action_embedding(actions) + self.action_frame  # [B, F, dim]
        memory = torch.cat((told, self.map_token.expand(len(told), 1, -1)), dim=1).to(x.dtype)  # [B, F + 1, dim]
        for block in self.blocks:
            x = block(x, time, memory, self.cos, self.sin)
        x, embedded = x[:, config.context_frames :], embedded[:, config.context_frames :]
        shift, scale = (embedded.unsqueeze(2) + self.head_modulation).unsqueeze(3).unbind(2)  # [B, clip, 1, dim]
        with torch.autocast(x.device.type, enabled=False):  # pixels need more than bfloat16's 8 bits
            return self.unpatchify(self.head(modulate(x.float(), shift, scale)))
