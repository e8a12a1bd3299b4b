"""How good is a checkpoint: PSNR of the first predicted clip for several samplers, and a sheet of long rollouts.

table = sampler_table(model, frames, actions, device="cuda")
# [{"steps": 1, "shift": 1.0, "psnr_db": 19.2, "psnr_sem_db": 0.3, "scenes": 64}, ...]
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from analysis.worlds.contact_sheet import contact_sheet
from analysis.worlds.tiny.diffusion import psnr_db, rollout, timesteps
from analysis.worlds.tiny.model import TinyModel

STEPS = (1, 2, 3, 4, 8)
SHIFTS = (1.0, 2.0, 3.0)


def predict(
    model: TinyModel,
    frames: np.ndarray,
    actions: np.ndarray,
    *,
    clips: int,
    steps: int,
    shift: float,
    device: str | torch.device,
    seed: int = 0,
    batch: int = 32,
) -> np.ndarray:
    """Rollouts of scenes uint8 [S, T, H, W, 3], context first -> uint8 [S, clips * clip_frames, H, W, 3]."""
    kept = model.config.context_frames
    predicted = []
    for start in range(0, len(frames), batch):
        rows = slice(start, start + batch)
        names = [f"heldout-{index:02d}" for index in range(len(frames))][rows]
        predicted.append(
            rollout(
                model,
                frames[rows, :kept],
                actions[rows],
                names,
                clips=clips,
                seed=seed,
                times=timesteps(steps, shift),
                clip_frames=model.config.clip_frames,
                device=device,
            )
        )
    return np.concatenate(predicted)


def first_clip_psnr(
    model: TinyModel,
    frames: np.ndarray,
    actions: np.ndarray,
    *,
    steps: int,
    shift: float,
    device: str | torch.device,
) -> dict[str, Any]:
    """Mean over scenes of the first clip's PSNR against the game's frames, with its standard error."""
    kept, length = model.config.context_frames, model.config.clip_frames
    predicted = predict(model, frames, actions, clips=1, steps=steps, shift=shift, device=device)
    values = psnr_db(predicted, frames[:, kept : kept + length])
    return {
        "steps": steps,
        "shift": shift,
        "psnr_db": float(values.mean()),
        "psnr_sem_db": float(values.std() / np.sqrt(len(values))),
        "scenes": len(values),
    }


def sampler_table(
    model: TinyModel, frames: np.ndarray, actions: np.ndarray, device: str | torch.device
) -> list[dict[str, Any]]:
    """`first_clip_psnr` for every sampler; the shift means nothing for a single step and is 1 there."""
    choices = [(steps, shift) for steps in STEPS for shift in SHIFTS if steps > 1 or shift == 1.0]
    return [
        first_clip_psnr(model, frames, actions, steps=steps, shift=shift, device=device) for steps, shift in choices
    ]


def baseline_psnr(frames: np.ndarray, context_frames: int, clip_frames: int) -> float:
    """PSNR in dB of repeating the last context frame: what a model must beat."""
    true = frames[:, context_frames : context_frames + clip_frames]
    still = np.repeat(frames[:, context_frames - 1 : context_frames], clip_frames, axis=1)
    return float(psnr_db(still, true).mean())


def final(
    average: TinyModel,
    held: tuple[np.ndarray, np.ndarray],
    out: Path,
    steps: int,
    shift: float,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Evaluate the weights as they are saved (rounded to bfloat16): sampler table, long rollouts, `contact-sheet.png`.

    Returns what belongs in the card: `held_out`, `still_psnr_db` (last frame repeated), `rollout_psnr_db` by clip.
    """
    device = next(average.parameters()).device
    frames, actions = held
    model = copy.deepcopy(average)
    for tensor in model.state_dict().values():
        tensor.copy_(tensor.bfloat16())
    table = sampler_table(model, frames, actions, device)
    for row in table:
        say(", ".join(f"{name} {value:.4g}" for name, value in row.items()))
    kept, length = model.config.context_frames, model.config.clip_frames
    count, clips = min(4, len(frames)), (frames.shape[1] - kept) // length
    true = frames[:count, kept : kept + clips * length]
    predicted = predict(model, frames[:count], actions[:count], clips=clips, steps=steps, shift=shift, device=device)
    rows: dict[str, np.ndarray] = {}
    for index in range(count):
        rows |= {f"heldout-{index:02d}: game": true[index], f"heldout-{index:02d}: model": predicted[index]}
    contact_sheet(rows, columns=17).save(out / "contact-sheet.png", optimize=True)
    by_clip = [
        float(psnr_db(predicted[:, at : at + length], true[:, at : at + length]).mean())
        for at in range(0, clips * length, length)
    ]
    return {"held_out": table, "still_psnr_db": baseline_psnr(frames, kept, length), "rollout_psnr_db": by_clip}
