"""Run a world with a sink attached: scene after scene, each forward pass labelled by scene, clip and step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from analysis.capture.hooks import Sink, attached
from analysis.sites import Site
from analysis.worlds.world import Call, Scene, World


class LabelledSink(Sink, Protocol):
    label: dict[str, Any]


def pick_scenes(world: World, count: int, clips: int) -> list[Scene]:
    """The first `count` scenes. ValueError where the world has fewer, or scenes too short for `clips`."""
    scenes = world.scenes()
    if not 1 <= count <= len(scenes):
        raise ValueError(f"{world.name} has {len(scenes)} scenes, asked for {count}; choose --scenes 1..{len(scenes)}")
    longest = min(len(scene.actions) for scene in scenes[:count]) // world.clip_frames
    if not 1 <= clips <= longest:
        raise ValueError(f"{world.name}'s scenes allow 1..{longest} clips, asked for {clips}; choose --clips in range")
    return scenes[:count]


def rollout_into(
    sink: LabelledSink,
    world: World,
    model: nn.Module,
    sites: Mapping[Site, nn.Module],
    scenes: Sequence[Scene],
    *,
    clips: int,
    seed: int,
    on_clip: Callable[[], None] | None = None,
) -> np.ndarray:
    """Roll every scene out with the sink attached -> predicted frames, uint8 [scenes, frames, H, W, 3].

    Scenes run one at a time, so that a call is one forward pass of one scene. An exception (Ctrl-C) leaves the
    finished calls in the sink.
    """

    def label(call: Call) -> None:
        sink.label = {"scene": call.scene, "clip": call.clip, "step": call.step}

    def progress(_: int) -> None:
        if on_clip is not None:
            on_clip()

    with torch.no_grad(), attached(model, sites, sink):
        frames = [
            world.rollout(model, [scene], clips=clips, seed=seed, on_call=label, on_clip=progress) for scene in scenes
        ]
    return np.concatenate(frames)
