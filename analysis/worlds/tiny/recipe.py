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
    own_context: float = 0.0  # second stage: share of clips whose context the model predicts itself
    init: str = ""  # second stage: folder of the checkpoint to start from
    timed_steps: int = 200
    eval_every: int = 2000
    save_every_s: float = 60.0
    eval_scenes: int = 96
    scenes: int = 16
    clips: int = 16
    sampler_steps: int = 8
    sampler_shift: float = 1.0
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

    def next(self) -> tuple[Tensor, ...]:
        """Input frames [B, F, H, W, 3], timesteps [B, F], actions [B, F, A], clean clip [B, clip, H, W, 3].

        With `own_context` also what the model needs to predict the context itself, from the frames before it: input
        frames, timesteps (1), actions, and bool [B, 1, 1, 1, 1], whether to use the prediction.
        """
        config, model = self.config, self.config.model
        batch, kept, own = config.batch, model.context_frames, config.own_context > 0
        before = model.clip_frames if own else 0
        episode = self._randint(self.episodes)
        start = self._randint(self.length - before - model.frames + 1)
        index = episode * self.length + start + torch.arange(before + model.frames, device=self.device)
        clean = self.frames[index].float() / 127.5 - 1  # [B, before + F, H, W, 3]
        actions = self.actions[index]
        levels = noise_levels(self._rand(batch, 1), self._rand(batch, 1), shift=1.5 if own else 3.0)
        shown = clean[:, before:]
        if not own:
            return (*self._noised(shown, levels), actions, shown[:, kept:])
        shown = torch.cat((self._blurred(shown[:, :kept]), shown[:, kept:]), dim=1)
        earlier = torch.cat((self._blurred(clean[:, :kept]), clean[:, kept : model.frames]), dim=1)
        use = self._rand(batch, 1, 1, 1, 1) < config.own_context
        first = self._noised(earlier, torch.ones_like(levels))
        final = self._noised(shown, levels)
        return (*final, actions[:, before:], shown[:, kept:], *first, actions[:, : model.frames], use)

    def _noised(self, clean: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
        """Mix noise into the clip to its level [B, 1], and a little into half of the contexts -> frames, timesteps.

        The model is told 0 for the context whatever was mixed in: it must cope with its own imperfect frames.
        """
        kept = self.config.model.context_frames
        times = torch.zeros(clean.shape[:2], device=self.device)
        times[:, kept:] = levels
        share = times.clone()
        share[:, :kept] = (self._rand(*levels.shape) < 0.5) * self._rand(*levels.shape) * self.config.context_noise
        share = share[:, :, None, None, None]
        return clean + share * (self._randn(*clean.shape) - clean), times

    def _blurred(self, frames: Tensor) -> Tensor:
        """Half of the contexts, blurred by a random amount: what frames look like after clips of the model's own."""
        flat = frames.flatten(0, 1).movedim(-1, 1)  # [B * C, 3, H, W]
        small = torch.nn.functional.avg_pool2d(flat, 4)
        wide = torch.nn.functional.interpolate(small, size=flat.shape[2:], mode="bilinear", align_corners=False)
        share = (self._rand(len(frames), 1) < 0.5) * self._rand(len(frames), 1)
        mixed = wide.movedim(1, -1).unflatten(0, frames.shape[:2])
        return frames + share[:, :, None, None, None] * (mixed - frames)


def noise_levels(u: Tensor, v: Tensor, shift: float) -> Tensor:
    """Timesteps in (0, 1] from uniform u and v: shifted toward noise, and exactly 1 in a tenth of the cases.

    A logit-normal of mean 0.3 hardly ever trains near 1, where every sampler starts.
    """
    return torch.where(v < 0.1, 1.0, shift * u / (1 + (shift - 1) * u))


def velocity_loss(predicted: Tensor, clean: Tensor, times: Tensor) -> Tensor:
    """Mean squared error of the velocity; `times` [B, F] as given to the model, of which the last one counts."""
    weight = 1 / times[:, -1].clamp(min=0.05) ** 2  # [B]
    return ((predicted.float() - clean).square().flatten(1).mean(1) * weight).mean()


def learning_rate(step: int, total: int, config: TrainConfig) -> float:
    """Warm-up, constant, then linear to 0 over the last `decay` of the steps."""
    falling = max(1.0, total * config.decay)
    return config.learning_rate * min(1.0, (step + 1) / config.warm_up, (total - step) / falling)
