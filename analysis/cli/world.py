"""`shrinkage world data`, `train` and `sample`: the embedded world model, from game frames to rollouts."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from analysis.cli.measure import CLIPS, DEVICE, OVERWRITE, SCENES, SEED, WORLD, console, pick_device, progress

world_app = typer.Typer(no_args_is_help=True, help="The embedded world model: make its data, train it, sample it.")
CORES = os.cpu_count() or 1


def register(app: typer.Typer) -> None:
    app.add_typer(world_app, name="world")


@world_app.command()
def data(
    out: Annotated[Path, typer.Option(help="File for the set (safetensors: frames uint8, actions float32).")],
    episodes: Annotated[int, typer.Option(min=1, help="Episodes to play.")] = 1000,
    frames: Annotated[int, typer.Option(min=9, help="Frames per episode.")] = 256,
    seed: SEED = 0,
    workers: Annotated[int, typer.Option(min=1, help="Processes.")] = CORES,
    overwrite: OVERWRITE = False,
) -> None:
    """Play the game and record frames and actions. Needs the extra `train`.

    Example: shrinkage world data --out runs/frames.safetensors --episodes 8 --frames 64
    """
    from safetensors.numpy import save_file

    from analysis.results.folder import check_free
    from analysis.results.schema import replacing
    from analysis.worlds.tiny import data as game

    check_free(out.parent, overwrite, (out.name,))
    _need_vizdoom()
    with progress("playing", episodes) as advance:
        shown, actions = game.generate(episodes, frames, seed, workers, lambda *_: advance())
    with replacing(out) as temporary:
        save_file({"frames": shown, "actions": actions}, temporary)
    console.print(f"{episodes} episodes x {frames} frames, SHA-256 {game.sha256(shown, actions)}", highlight=False)
    typer.echo(str(out))


@world_app.command()
def train(
    out: Annotated[Path, typer.Option(help="Folder for checkpoint, card, log and held-out scenes.")],
    steps: Annotated[int, typer.Option(min=0, help="Training steps (repeats a recorded run).")] = 0,
    seconds: Annotated[float, typer.Option(min=0, help="Or: as many steps as fit this time.")] = 0.0,
    episodes: Annotated[int, typer.Option(min=1, help="Episodes of game frames to train on.")] = 1000,
    init: Annotated[Path | None, typer.Option(help="Second stage: folder of the checkpoint to start from.")] = None,
    own_context: Annotated[
        float, typer.Option(min=0, max=1, help="Second stage: share of clips whose context the model predicts itself.")
    ] = 0.0,
    seed: SEED = 0,
    workers: Annotated[int, typer.Option(min=1, help="Processes that play the game.")] = CORES,
    device: DEVICE = "auto",
    overwrite: OVERWRITE = False,
) -> None:
    """Train the world model from seeds. Needs the extra `train`, and in practice a GPU.

    Example: shrinkage world train --out runs/world --seconds 900
    """
    started = time.monotonic()
    from analysis.results.folder import check_free
    from analysis.worlds.tiny.train import TrainConfig
    from analysis.worlds.tiny.train import train as run

    check_free(out, overwrite, ("card.json", "model.safetensors"))
    _need_vizdoom()
    chosen = pick_device(device)
    config = TrainConfig(
        steps=steps,
        seconds=seconds,
        seed=seed,
        episodes=episodes,
        init="" if init is None else str(init),
        own_context=own_context,
        workers=workers,
        device=chosen,
        compile=chosen != "cpu",
    )
    run(config, out, say=lambda text: console.print(text, highlight=False), started=started)
    typer.echo(str(out / "card.json"))


@world_app.command()
def sample(
    out: Annotated[Path, typer.Option(help="Folder for the pictures.")],
    world: WORLD = "tiny",
    scenes: SCENES = 2,
    clips: CLIPS = 8,
    seed: SEED = 0,
    device: DEVICE = "auto",
    overwrite: OVERWRITE = False,
) -> None:
    """Roll the world out: a contact sheet and one animation per scene, the game above, the model below.

    Example: shrinkage world sample --out runs/sample --scenes 4 --clips 16
    """
    import numpy as np
    from PIL import Image

    from analysis.capture.session import pick_scenes
    from analysis.results.folder import check_free
    from analysis.results.schema import replacing
    from analysis.worlds.contact_sheet import contact_sheet
    from analysis.worlds.world import get_world

    check_free(out, overwrite, ("contact_sheet.png",))
    chosen = get_world(world)
    picked = pick_scenes(chosen, scenes, clips)
    model = chosen.load(pick_device(device))
    rows: dict[str, np.ndarray] = {}
    with progress("sampling", len(picked) * clips) as advance:
        for scene in picked:
            predicted = chosen.rollout(model, [scene], clips=clips, seed=seed, on_clip=lambda _: advance())[0]
            true = scene.frames[: len(predicted)]
            rows |= {f"{scene.name}: game": true, f"{scene.name}: {chosen.name}": predicted}
            both = [Image.fromarray(frame) for frame in np.concatenate((true, predicted), axis=1)]
            with replacing(out / f"{scene.name}.webp") as temporary:
                both[0].save(temporary, save_all=True, append_images=both[1:], duration=57, loop=0, lossless=True)
    with replacing(out / "contact_sheet.png") as temporary:
        contact_sheet(rows).save(temporary)
    typer.echo(str(out / "contact_sheet.png"))


def _need_vizdoom() -> None:
    try:
        import vizdoom  # noqa: F401
    except ImportError:
        raise ValueError("this needs the game engine: pip install 'int8-shrinkage[train]'") from None
