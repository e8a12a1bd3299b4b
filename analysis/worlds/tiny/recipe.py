"""What TinyWorld is trained on and how: configuration, batches, loss, learning rate.

config = TrainConfig(steps=30_000)
frames, times, actions, clean = Batches(data_frames, data_actions, config).next()
loss = velocity_loss(model(frames, times, actions), clean, times)
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from analysis.worlds.tiny.model import TinyConfig


@dataclass(frozen=True)
class TrainConfig:
    """One run. Exactly one of `steps` and `seconds` (from the start of the process to the last step) is given."""

    steps: int = 0
    seconds: float = 0.0
    seed: int = 0
    episodes: int = 1000
    frames_per_episode: int = 256
    workers: int = 16
    batch: int = 128
    learning_rate: float = 1e-3
    weight_decay: float = 0.02
    warm_up: int = 500
    decay: float = 0.3  # last part of the steps, over which the learning rate falls to 0
    ema: float = 0.999
    context_noise: float = 0.2  # largest share of noise mixed into the context of half of the clips
    timed_steps: int = 200
    eval_every: int = 2000
    save_every_s: float = 60.0
    eval_scenes: int = 96
    scenes: int = 16
    clips: int = 16
    sampler_steps: int = 3
    sampler_shift: float = 2.0
    device: str = "cuda"
    compile: bool = True
    model: TinyConfig = field(default_factory=TinyConfig)

    def __post_init__(self) -> None:
        if (self.steps > 0) == (self.seconds > 0):
            raise ValueError(f"give either steps or seconds, got steps={self.steps}, seconds={self.seconds}")
        if self.eval_scenes < self.scenes:
            raise ValueError(f"eval_scenes ({self.eval_scenes}) must be at least scenes ({self.scenes})")


class Batches:
    """Random clips of consecutive frames, noised, from a set that stays on the device as uint8."""

    def __init__(self, frames: np.ndarray, actions: np.ndarray, config: TrainConfig) -> None:
        self.config, self.device = config, torch.device(config.device)
        self.length = frames.shape[1]
        self.episodes = len(frames)
        self.frames = torch.from_numpy(frames).flatten(0, 1).to(self.device)  # uint8 [E * T, H, W, 3]
        self.actions = torch.from_numpy(actions).flatten(0, 1).to(self.device)
        self.generator = torch.Generator(self.device).manual_seed(config.seed + 1)

    def _rand(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, device=self.device)

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device)

    def _randint(self, high: int) -> Tensor:
        return torch.randint(high, (self.config.batch, 1), generator=self.generator, device=self.device)

    def next(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Input frames [B, F, H, W, 3], timesteps [B, F], actions [B, F, A], clean clip [B, clip, H, W, 3]."""
        config, model = self.config, self.config.model
        batch, kept = config.batch, model.context_frames
        episode = self._randint(self.episodes)
        start = self._randint(self.length - model.frames + 1)
        index = episode * self.length + start + torch.arange(model.frames, device=self.device)  # [B, F]
        clean = self.frames[index].float() / 127.5 - 1
        times = torch.zeros(batch, model.frames, device=self.device)
        times[:, kept:] = noise_levels(self._rand(batch, 1), self._rand(batch, 1))
        disturbed = (self._rand(batch, 1) < 0.5) * self._rand(batch, 1) * config.context_noise
        share = times.clone()
        share[:, :kept] = disturbed  # the model is told 0: it must cope with its own imperfect frames
        share = share[:, :, None, None, None]
        noise = self._randn(*clean.shape)
        return clean + share * (noise - clean), times, self.actions[index], clean[:, kept:]


def noise_levels(u: Tensor, v: Tensor) -> Tensor:
    """Timesteps in (0, 1] from uniform u and v: shifted toward noise by 3, and exactly 1 in a tenth of the cases.

    The sampler visits 1, 0.8 and 0.5; a logit-normal of mean 0.3 hardly ever trains near 1, where it starts.
    """
    return torch.where(v < 0.1, 1.0, 3 * u / (1 + 2 * u))


def velocity_loss(predicted: Tensor, clean: Tensor, times: Tensor) -> Tensor:
    """Mean squared error of the velocity; `times` [B, F] as given to the model, of which the last one counts."""
    weight = 1 / times[:, -1].clamp(min=0.05) ** 2  # [B]
    return ((predicted.float() - clean).square().flatten(1).mean(1) * weight).mean()


def learning_rate(step: int, total: int, config: TrainConfig) -> float:
    """Warm-up, constant, then linear to 0 over the last `decay` of the steps."""
    falling = max(1.0, total * config.decay)
    return config.learning_rate * min(1.0, (step + 1) / config.warm_up, (total - step) / falling)
