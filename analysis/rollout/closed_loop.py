"""Closed loops, paired: the same scene, actions and noise through the model in each mode, every frame scored.

Noise is keyed by (seed, scene, clip, step), never by the order of calls; `check_pairing` shows it before anything is
measured. Modes are those of `quantized`; `bf16` is the reference, `fp32` the model as it is (how far bf16's own
rounding carries), `other_seed` the bf16 model with another seed's noise (how far apart two samples of one model are).

    result = closed_loop(world, model, partial(quantized, sites), scenes, Plan(clips=8, seeds=(0, 1)), Scoring())
    verdicts = results.closed_loop.summarize(result.frames, result.statistics)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from analysis.rollout.quantized import BF16, PLAIN
from analysis.rollout.scoring import Scorer, Scoring
from analysis.worlds.world import Scene, World

OTHER_SEED, TRUE = "other_seed", "true"


@dataclass(frozen=True)
class Plan:
    """What is rolled out. `batch` scenes go through the model together; the noise floor fp32 can be left out."""

    variants: tuple[str, ...] = ("shipped", "fixed")
    clips: int = 8
    seeds: tuple[int, ...] = (0,)
    batch: int = 1
    fp32: bool = True

    def __post_init__(self) -> None:
        if not self.variants or len(set(self.variants)) != len(self.variants):
            raise ValueError(f"variants must be distinct and at least one, got {list(self.variants)}")
        if taken := {PLAIN, BF16, OTHER_SEED, TRUE} & set(self.variants):
            raise ValueError(f"{', '.join(sorted(taken))} is rolled out anyway; name quantisers only: shipped, fixed")
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"seeds must be distinct and at least one, got {list(self.seeds)}")

    @property
    def modes(self) -> tuple[str, ...]:
        return (BF16, *((PLAIN,) if self.fp32 else ()), *self.variants)

    @property
    def rollouts(self) -> int:
        """Rollouts of every scene: one a mode and seed, one more where a single seed has no other to be set against."""
        return len(self.modes) * len(self.seeds) + (1 if len(self.seeds) == 1 else 0)


@dataclass
class ClosedLoop:
    """The two per-frame tables, and the first seed's frames for pictures: mode -> uint8 [scenes, T, H, W, 3]."""

    frames: pd.DataFrame
    statistics: pd.DataFrame
    shown: dict[str, np.ndarray] = field(default_factory=dict)


def closed_loop(
    world: World,
    model: nn.Module,
    swap: Callable[[str], AbstractContextManager[None]],
    scenes: Sequence[Scene],
    plan: Plan,
    scoring: Scoring,
    on_clip: Callable[[], None] | None = None,
) -> ClosedLoop:
    """Roll out every mode of the plan and score it.

    Args:
        swap: puts the model into a mode inside a `with` block: `quantized` with its sites filled in.
        on_clip: called after every clip of every batch, plan.rollouts * clips * ceil(scenes / batch) times.

    Raises:
        ValueError: the noise is not keyed by labels, an unknown variant, or a metric that is not installed.
    """
    check_pairing(world, model, scenes, plan.seeds[0])

    def roll(mode: str, seed: int) -> np.ndarray:
        batches = [scenes[i : i + plan.batch] for i in range(0, len(scenes), plan.batch)]
        with swap(mode):
            parts = [
                world.rollout(
                    model, batch, clips=plan.clips, seed=seed, on_clip=lambda _: on_clip() if on_clip else None
                )
                for batch in batches
            ]
        return np.concatenate(parts)

    length = world.clip_frames
    reference: dict[int, np.ndarray] = {}
    shown: dict[str, np.ndarray] = {}
    with Scorer(scoring) as scorer:

        def enter(variant: str, seed: int, predicted: np.ndarray, against: str, other: Iterable[np.ndarray]) -> None:
            for scene, a, b in zip(scenes, other, predicted, strict=True):
                label = {"variant": variant, "against": against, "scene": scene.name, "seed": seed}
                scorer.compare(label, a[: len(b)], b, length)

        for seed in plan.seeds:
            for mode in plan.modes:
                predicted = roll(mode, seed)
                enter(mode, seed, predicted, TRUE, [scene.frames for scene in scenes])
                for scene, frames in zip(scenes, predicted, strict=True):
                    scorer.describe({"variant": mode, "scene": scene.name, "seed": seed}, frames, length)
                if mode == BF16:
                    reference[seed] = predicted
                else:
                    enter(mode, seed, predicted, BF16, reference[seed])
                if seed == plan.seeds[0]:
                    shown[mode] = predicted
        for seed, other in _other_seeds(plan.seeds):
            predicted = reference[other] if other in reference else roll(BF16, other)
            enter(OTHER_SEED, seed, predicted, BF16, reference[seed])
        for scene in scenes:
            frames = scene.frames[: plan.clips * length]
            scorer.describe({"variant": TRUE, "scene": scene.name, "seed": -1}, frames, length)
        compared, described = scorer.tables()
    return ClosedLoop(compared, described, shown)


def _other_seeds(seeds: Sequence[int]) -> list[tuple[int, int]]:
    """Each seed with the one that it is set against: the next of the list, or seed + 1 where there is only one."""
    if len(seeds) == 1:
        return [(seeds[0], seeds[0] + 1)]
    return [(seed, seeds[(place + 1) % len(seeds)]) for place, seed in enumerate(seeds)]


def check_pairing(world: World, model: nn.Module, scenes: Sequence[Scene], seed: int) -> None:
    """Show that what the model is fed depends on scene and seed alone, not on what ran before.

    Two scenes (or one, twice) are begun, then again in the other order; every tensor that reaches the model must be the
    same, bit for bit. Another seed must change it.

    Raises:
        ValueError: it is not so, and a comparison between kernels would also compare different noise.
    """
    probe = list(scenes[:2])
    forward = [_inputs(world, model, scene, seed) for scene in probe]
    backward = [_inputs(world, model, scene, seed) for scene in reversed(probe)][::-1]
    for scene, a, b in zip(probe, forward, backward, strict=True):
        if len(a) != len(b) or not all(torch.equal(x, y) for x, y in zip(a, b, strict=True)):
            raise ValueError(
                f"world {world.name!r}: scene {scene.name!r} with seed {seed} is fed different noise when scenes run "
                "in another order, so rollouts cannot be paired; key the generator by (seed, scene, clip, step)"
            )
    other = _inputs(world, model, probe[0], seed + 1)
    if all(torch.equal(x, y) for x, y in zip(forward[0], other, strict=True)):
        raise ValueError(
            f"world {world.name!r}: seeds {seed} and {seed + 1} feed the model the same noise, so there is no noise "
            "floor; key the generator by (seed, scene, clip, step)"
        )


class _Enough(Exception):
    """Ends a rollout that has shown what it was begun for."""


def _inputs(world: World, model: nn.Module, scene: Scene, seed: int, passes: int = 2) -> list[Tensor]:
    """Copies of every tensor that the model is called with in the first forward passes of one scene's first clip."""
    seen: list[list[Tensor]] = []

    def keep(_: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        seen.append([x.detach().clone() for x in (*args, *kwargs.values()) if isinstance(x, Tensor)])
        if len(seen) == passes:
            raise _Enough

    handle = model.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        with suppress(_Enough):
            world.rollout(model, [scene], clips=1, seed=seed)
    finally:
        handle.remove()
    return [x for call in seen for x in call]
