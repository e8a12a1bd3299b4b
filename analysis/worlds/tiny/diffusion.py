"""Noise in, clip out: timesteps, noise that depends on names only, Euler sampling, closed-loop rollouts.

x_t = (1 - t) x_0 + t noise. The network predicts x_0, so that a step from t to s is x_s = x_0 + (s / t) (x_t - x_0),
and the last step returns the prediction itself.

    clip = sample_clip(model, context, actions, noise, times=timesteps(3, shift=2.0))
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor


def timesteps(steps: int, shift: float) -> list[float]:
    """steps + 1 times from 1 to 0; a `shift` above 1 spends more of them near the noise."""
    if steps < 1 or shift <= 0:
        raise ValueError(f"need at least 1 step and a positive shift, got steps={steps}, shift={shift}")
    even = [1 - index / steps for index in range(steps + 1)]
    return [shift * time / (1 + (shift - 1) * time) for time in even]


def named_noise(shape: Sequence[int], *, seed: int, scene: str, clip: int, step: int = 0) -> Tensor:
    """Standard normal float32 noise on the CPU, fixed by its labels: not by device, batch or order of calls."""
    digest = hashlib.sha256(f"{seed}/{scene}/{clip}/{step}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.randn(tuple(shape), generator=generator)


def to_float(frames: np.ndarray | Tensor) -> Tensor:
    """uint8 0..255 -> float32 -1..1."""
    return torch.as_tensor(frames).float() / 127.5 - 1


def to_uint8(frames: Tensor) -> Tensor:
    """float -1..1 -> uint8 0..255, rounded to the nearest, clipped."""
    return ((frames.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


def sample_clip(
    model: Callable[[Tensor, Tensor, Tensor], Tensor],
    context: Tensor,
    actions: Tensor,
    noise: Tensor,
    times: Sequence[float],
    on_step: Callable[[int], None] | None = None,
) -> Tensor:
    """Context [B, C, H, W, 3] in [-1, 1], actions [B, C + clip, A], noise [B, clip, H, W, 3] -> clip in [-1, 1]."""
    x = noise
    for step, (time, after) in enumerate(pairwise(times)):
        if on_step:
            on_step(step)
        now = torch.zeros(actions.shape[:2], device=x.device)
        now[:, context.shape[1] :] = time
        clean = model(torch.cat((context, x), dim=1), now, actions).float()
        x = clean + (after / time) * (x - clean)
    return x


@torch.no_grad()
def rollout(
    model: Callable[[Tensor, Tensor, Tensor], Tensor],
    context: np.ndarray,
    actions: np.ndarray,
    names: Sequence[str],
    *,
    clips: int,
    seed: int,
    times: Sequence[float],
    clip_frames: int,
    device: str | torch.device = "cpu",
    on_step: Callable[[int, int], None] | None = None,
    on_clip: Callable[[int], None] | None = None,
) -> np.ndarray:
    """Predict clip after clip, each from the last predicted frames, which are rounded to uint8 like the game's.

    Args:
        context: uint8 [B, C, H, W, 3]; `actions` float32 [B, C + clips * clip_frames or more, A] start with theirs.
        names: one per scene; they key the noise.
        on_step: called with (clip, step) before every forward pass.

    Returns:
        uint8 [B, clips * clip_frames, H, W, 3].
    """
    shown, told = to_float(context).to(device), torch.as_tensor(actions, dtype=torch.float32, device=device)
    kept, length = shown.shape[1], clip_frames
    predicted = []
    for clip in range(clips):
        shape = (length, *shown.shape[2:])
        noise = torch.stack([named_noise(shape, seed=seed, scene=name, clip=clip) for name in names]).to(device)
        window = told[:, clip * length : clip * length + kept + length]
        label = None if on_step is None else lambda step, clip=clip: on_step(clip, step)
        frames = to_uint8(sample_clip(model, shown, window, noise, times, label))
        predicted.append(frames.cpu().numpy())
        shown = torch.cat((shown, to_float(frames)), dim=1)[:, -kept:]
        if on_clip:
            on_clip(clip)
    return np.concatenate(predicted, axis=1)


def psnr_db(predicted: np.ndarray, true: np.ndarray) -> np.ndarray:
    """Peak signal-to-noise ratio in dB of uint8 frames over all axes but the first: [B, ...] -> float64 [B]."""
    error = predicted.astype(np.float64) - true
    return 10 * np.log10(255**2 / np.maximum((error**2).reshape(len(error), -1).mean(1), 1e-10))
