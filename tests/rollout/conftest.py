"""A world of micro size: random weights, smooth scenes, whose true frames are what its own bf16 model rolls out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn

from analysis.rollout.quantized import quantized
from analysis.sites import find_sites, preset
from analysis.worlds.tiny import diffusion
from analysis.worlds.tiny.model import TinyConfig, TinyModel
from analysis.worlds.world import Call, Scene

MICRO = TinyConfig(dim=24, blocks=2, heads=2, height=16, width=24)
Noise = Callable[..., torch.Tensor]


@dataclass
class MicroWorld:
    """Implements `analysis.worlds.world.World`; `noise` can be planted."""

    made: list[Scene]
    noise: Noise = diffusion.named_noise
    name: str = "micro"
    sites: str = "matrix-game-3"
    clip_frames: int = 4

    def checkpoint_sha256(self) -> str:
        return "0" * 64

    def load(self, device: str | torch.device = "cpu") -> nn.Module:
        torch.manual_seed(0)
        model = TinyModel(MICRO)
        nn.init.normal_(model.head.weight, std=0.1)
        return model.eval().requires_grad_(False).to(device)

    def scenes(self) -> list[Scene]:
        return self.made

    def rollout(
        self,
        model: nn.Module,
        scenes: Sequence[Scene],
        *,
        clips: int,
        seed: int,
        on_call: Callable[[Call], None] | None = None,
        on_clip: Callable[[int], None] | None = None,
    ) -> np.ndarray:
        label = "+".join(scene.name for scene in scenes)
        kept, diffusion.named_noise = diffusion.named_noise, self.noise
        try:
            return diffusion.rollout(
                model,
                np.stack([s.context for s in scenes]),
                np.stack([np.concatenate((s.context_actions, s.actions)) for s in scenes]),
                [s.name for s in scenes],
                clips=clips,
                seed=seed,
                times=diffusion.timesteps(2, 2.0),
                clip_frames=4,
                on_step=lambda clip, step: on_call(Call(label, clip, step)) if on_call else None,
                on_clip=on_clip,
            )
        finally:
            diffusion.named_noise = kept


def micro_world(count: int = 4, clips: int = 2, noise: float = 2.0) -> MicroWorld:
    """Scenes of random smooth frames; true frames: the bf16 rollout plus noise of `noise` 8-bit steps."""
    rng = np.random.default_rng(0)
    scenes = []
    for index in range(count):
        coarse = rng.integers(0, 256, (4, 4, 6, 3)).repeat(4, 1).repeat(4, 2)
        actions = rng.normal(size=(4 + 4 * clips, 3)).astype(np.float32)
        empty = np.zeros((4 * clips, 16, 24, 3), np.uint8)
        scenes.append(Scene(f"s{index}", coarse.astype(np.uint8), actions[:4], actions[4:], empty))
    world = MicroWorld(scenes)
    model = world.load()
    with quantized(find_sites(model, preset(world.sites)), "bf16"):
        truth = world.rollout(model, scenes, clips=clips, seed=0)
    noisy = truth + rng.normal(0, noise, truth.shape)
    world.made = [replace(s, frames=np.clip(f, 0, 255).astype(np.uint8)) for s, f in zip(scenes, noisy, strict=True)]
    return world


@pytest.fixture(scope="session")
def world() -> MicroWorld:
    return micro_world()
