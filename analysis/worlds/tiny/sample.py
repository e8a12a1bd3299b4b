"""TinyWorld as a `World`: the embedded checkpoint, its held-out scenes, and closed-loop rollouts.

    world = TinyWorld()
    model = world.load("cpu")
    frames = world.rollout(model, world.scenes()[:2], clips=4, seed=0)  # uint8 [2, 16, 64, 96, 3]

Files are looked for in the folder that `SHRINKAGE_TINY_WORLD` names, else beside this module (`assets`, as installed),
else in `data/tiny-world` of the repository. The weights hold bfloat16 values and are computed with in float32.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from analysis.worlds.tiny import diffusion
from analysis.worlds.tiny.checkpoint import CARD, WEIGHTS, load_checkpoint, read_card
from analysis.worlds.tiny.model import TinyConfig
from analysis.worlds.tiny.scenes import check, read_scenes
from analysis.worlds.world import Call, Scene

VARIABLE = "SHRINKAGE_TINY_WORLD"


def find_folder() -> Path:
    """The folder with TinyWorld's files by the rule above; FileNotFoundError says where it looked."""
    here = Path(__file__).resolve()
    chosen = os.environ.get(VARIABLE)
    places = [Path(chosen)] if chosen else [here.parent / "assets", here.parents[3] / "data" / "tiny-world"]
    for place in places:
        if (place / CARD).is_file():
            return place
    looked = " and ".join(str(place) for place in places)
    raise FileNotFoundError(f"no TinyWorld checkpoint ({CARD}) in {looked}; set {VARIABLE} to a folder that has one")


class TinyWorld:
    """The embedded world model. Implements `analysis.worlds.world.World`."""

    name = "tiny"
    sites = "matrix-game-3"

    def __init__(self, folder: Path | None = None) -> None:
        """`folder` replaces the search for one. Raises FileNotFoundError when there is no checkpoint."""
        self.folder = find_folder() if folder is None else folder
        self.card: dict[str, Any] = read_card(self.folder)
        self.config = TinyConfig(**self.card["model"])
        self.clip_frames = self.config.clip_frames

    def checkpoint_sha256(self) -> str:
        """SHA-256 of the weights' file, checked against the card. Raises ValueError when it was altered."""
        expected: str = self.card["weights_sha256"]
        check(self.folder / WEIGHTS, expected)
        return expected

    def load(self, device: str | torch.device = "cpu") -> torch.nn.Module:
        """The model in eval mode, frozen, float32. Raises FileNotFoundError or ValueError as `load_checkpoint`."""
        return load_checkpoint(self.folder)[0].to(device)

    @cached_property
    def _scenes(self) -> list[Scene]:
        return read_scenes(self.folder / "scenes")

    def scenes(self) -> list[Scene]:
        """The held-out scenes, by name."""
        return list(self._scenes)

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
        """Predicted frames uint8 [scenes, clips * clip_frames, 64, 96, 3], with the sampler of the card.

        Predicted frames are rounded to uint8 before they are fed back. Noise depends on (seed, scene, clip) alone.

        Raises:
            ValueError: no scene or clip, or more clips than a scene has actions for.
        """
        if not scenes or clips < 1:
            raise ValueError(f"need at least one scene and one clip, got {len(scenes)} scenes and {clips} clips")
        needed = clips * self.clip_frames
        for scene in scenes:
            if len(scene.actions) < needed:
                allowed = len(scene.actions) // self.clip_frames
                raise ValueError(f"scene {scene.name!r} has actions for {allowed} clips, {clips} were asked for")
        names = [scene.name for scene in scenes]
        label = "+".join(names)

        def on_step(clip: int, step: int) -> None:
            if on_call:
                on_call(Call(label, clip, step))

        sampler = self.card["sampler"]
        return diffusion.rollout(
            model,
            np.stack([scene.context for scene in scenes]),
            np.stack([np.concatenate((scene.context_actions, scene.actions[:needed])) for scene in scenes]),
            names,
            clips=clips,
            seed=seed,
            times=diffusion.timesteps(sampler["steps"], sampler["shift"]),
            clip_frames=self.clip_frames,
            device=next(model.parameters()).device,
            on_step=on_step,
            on_clip=on_clip,
        )
