"""What a world is: something with scenes, a model whose attention projections can be measured, and a rollout.

A *scene* is a start (context frames and their actions) and the actions that follow, with the game's own frames for
comparison. A *rollout* predicts it clip by clip, feeding its own frames back. One forward pass of the model is a
*call*; it is labelled by scene, clip and denoising step, and the unit that intervals are computed over.

    world = get_world("tiny")
    model = world.load("cpu")
    frames = world.rollout(model, world.scenes()[:1], clips=2, seed=0)   # uint8 [1, 8, H, W, 3]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Scene:
    """One held-out episode. `frames` are what the game showed for `actions`; the model never sees them."""

    name: str
    context: np.ndarray  # uint8 [context_frames, H, W, 3]
    context_actions: np.ndarray  # float32 [context_frames, action_dim]
    actions: np.ndarray  # float32 [T, action_dim]
    frames: np.ndarray  # uint8 [T, H, W, 3]


@dataclass(frozen=True)
class Call:
    """Label of one forward pass. `scene` names every scene of the batch, joined by '+'."""

    scene: str
    clip: int
    step: int


class World(Protocol):
    """A model with its scenes. Noise is keyed by (seed, scene, clip, step), never by the order of calls."""

    name: str
    sites: str  # preset of analysis.sites that finds the measured layers
    clip_frames: int

    def checkpoint_sha256(self) -> str: ...

    def load(self, device: str | torch.device) -> torch.nn.Module:
        """The model in eval mode on `device`, its parameters frozen."""
        ...

    def scenes(self) -> list[Scene]: ...

    def rollout(
        self,
        model: torch.nn.Module,
        scenes: Sequence[Scene],
        *,
        clips: int,
        seed: int,
        on_call: Callable[[Call], None] | None = None,
        on_clip: Callable[[int], None] | None = None,
    ) -> np.ndarray:
        """Predicted frames, uint8 [scenes, clips * clip_frames, H, W, 3]; the scenes of one call form one batch.

        `on_call` runs before every forward pass, `on_clip` after every finished clip (for progress bars).
        """
        ...


def get_world(name: str) -> World:
    """The world called `name`. Raises ValueError naming the known ones."""
    if name == "tiny":
        from analysis.worlds.tiny.sample import TinyWorld

        return TinyWorld()
    raise ValueError(f"unknown world {name!r}; known: 'tiny'. For your own model use `shrinkage attach`.")
