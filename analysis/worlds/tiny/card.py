"""`MODEL_CARD.md` from `card.json`, so that no number in it is typed by hand.

write_card(Path("data/tiny-world"))
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from analysis.worlds.tiny.checkpoint import WEIGHTS, read_card

NAME = "MODEL_CARD.md"

_TEMPLATE = """# TinyWorld

A small action-conditioned video diffusion transformer in Matrix-Game-3.0's block layout, trained on game frames.
It exists so that errors of int8 attention projections can be measured in a trained world model without a GPU.
It is not a game engine: long rollouts drift from the true path.

![Rows alternate the game's frames and the model's](contact-sheet.png)

| | |
|---|---|
| weights | `{weights}`, bfloat16, {parameters:,} parameters, SHA-256 `{sha}` |
| network | width {dim}, {blocks} blocks, {heads} heads, patch {patch}, frames: {context} shown, {clip} predicted |
| frames | {width} x {height}, {map} of `{game}`, gamma and two tics a frame as in `analysis/worlds/tiny/data.py` |
{stages}
| sampler | {sampler_steps} Euler steps, shift {shift:g} |

## Held-out scenes

Episodes {first} to {last}, never trained on, of the same map. PSNR of the first predicted clip against the game's
frames, mean over {scenes} scenes, with the weights as saved. Repeating the last context frame gives {still:.2f} dB.

| steps | shift | PSNR (dB) | standard error (dB) |
|---|---|---|---|
{table}

Closed loop, PSNR in dB by clip, mean over {rolled}: {rollout}.

## Repeat

```sh
{commands}
```

This needs the extra `train`. The frames are reproduced bit by bit; the weights only as far as the GPU adds in the
same order.

## Licence

The frames show Freedoom, whose notice is in `FREEDOOM-LICENSE.txt` and travels with frames and weights.
"""


_STAGE = """| stage {index}: frames | {episodes} episodes of {length} ({frames:,}), seed {seed}, SHA-256 `{data}` |
| stage {index}: training | {steps:,} steps of {batch} clips, AdamW {rate:g}, average {ema:g}, own context {own:g} |
| stage {index}: run | {seconds:.0f} s with data and evaluation, {hardware}, torch {torch}; last loss {loss:.4f} |"""
_COMMAND = (
    "python -m analysis.worlds.tiny.train --out {out} --steps {steps} --seed {seed} --episodes {episodes} "
    "--learning-rate {rate:g} --warm-up {warm_up} --decay {decay:g} --ema {ema:g} --own-context {own:g}{init}"
)


def _stages(card: dict[str, Any]) -> list[dict[str, Any]]:
    """What differs between the stages of a training, first to last."""
    stages = []
    for index, stage in enumerate([card["first_stage"], card] if "first_stage" in card else [card], start=1):
        training = stage["training"]
        stages.append(
            {
                "index": index,
                "out": f"stage-{index}",
                "init": f" --init stage-{index - 1}" if index > 1 else "",
                "episodes": training["episodes"],
                "length": training["frames_per_episode"],
                "frames": stage["frames"],
                "seed": training["seed"],
                "data": stage["data_sha256"],
                "steps": stage["steps"],
                "batch": training["batch"],
                "rate": training["learning_rate"],
                "warm_up": training["warm_up"],
                "decay": training["decay"],
                "ema": training["ema"],
                "own": training.get("own_context", 0.0),
                "seconds": stage["seconds"],
                "hardware": stage["hardware"],
                "torch": stage["torch"],
                "loss": stage["log"][-1]["loss"],
            }
        )
    return stages


def render(card: dict[str, Any]) -> str:
    """The text for a finished training's card. Raises ValueError when the evaluation is missing."""
    if "held_out" not in card:
        raise ValueError("the card has no 'held_out' table; the training was stopped before its evaluation")
    model, stages = card["model"], _stages(card)
    table = "\n".join(
        f"| {row['steps']} | {row['shift']:g} | {row['psnr_db']:.2f} | {row['psnr_sem_db']:.2f} |"
        for row in card["held_out"]
    )
    first, end = card["held_out_episodes"]
    return _TEMPLATE.format(
        weights=WEIGHTS,
        parameters=card["parameters"],
        sha=card["weights_sha256"],
        dim=model["dim"],
        blocks=model["blocks"],
        heads=model["heads"],
        patch=model["patch"],
        context=model["context_frames"],
        clip=model["clip_frames"],
        width=model["width"],
        height=model["height"],
        map=card["map"],
        game=card["game"],
        stages="\n".join(_STAGE.format(**stage) for stage in stages),
        commands="\n".join(_COMMAND.format(**stage) for stage in stages),
        sampler_steps=card["sampler"]["steps"],
        shift=card["sampler"]["shift"],
        first=first,
        last=end - 1,
        scenes=card["held_out"][0]["scenes"],
        still=card["still_psnr_db"],
        table=table,
        rolled=f"{min(4, card['held_out'][0]['scenes'])} scenes",
        rollout=", ".join(f"{value:.1f}" for value in card["rollout_psnr_db"]),
    )


def write_card(folder: Path) -> Path:
    """Write `MODEL_CARD.md` beside `card.json`."""
    path = folder / NAME
    path.write_text(render(read_card(folder)))
    return path
