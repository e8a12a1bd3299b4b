"""`shrinkage propagate`: the same inputs through bf16 and quantised models, block by block, and what attention sees."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer
from rich.table import Table

from analysis.cli.measure import (
    DEVICE,
    ENGINE,
    OUT,
    OVERWRITE,
    SCENES,
    SEED,
    VARIANTS,
    WORLD,
    Console,
    pick_device,
    progress,
    run_info,
)


def register(app: typer.Typer) -> None:
    app.command()(propagate)


def propagate(
    out: OUT,
    world: WORLD = "tiny",
    scenes: SCENES = 2,
    clips: Annotated[int, typer.Option(min=1, help="Clips per scene.")] = 1,
    seed: SEED = 0,
    variants: VARIANTS = "shipped,fixed",
    every: Annotated[int, typer.Option(min=1, help="Use every Nth forward pass.")] = 1,
    isolated: Annotated[bool, typer.Option(help="Also quantise one block at a time.")] = True,
    attention: Annotated[bool, typer.Option(help="Also measure what attention sees of q, k and v.")] = True,
    engine: ENGINE = "auto",
    device: DEVICE = "auto",
    overwrite: OVERWRITE = False,
) -> None:
    """Same inputs through bf16 and quantised models: how the error grows from block to block, and what attention sees.

    Example: shrinkage propagate --world tiny --out runs/tiny --scenes 4
    """
    from analysis.capture.session import pick_scenes
    from analysis.measure.engine import pick_engine
    from analysis.results import propagation as results
    from analysis.results import studies, tables
    from analysis.results.folder import check_free
    from analysis.rollout import attention as seen
    from analysis.rollout import propagation
    from analysis.sites import find_sites, preset
    from analysis.worlds.world import get_world

    written = (studies.PROPAGATION, *((studies.ATTENTION,) if attention else ()))
    check_free(out, overwrite, tuple(table.file for table in written))
    started = time.time()
    device, names = pick_device(device), variants.split(",")
    kernels = pick_engine(names, device, engine)
    chosen = get_world(world)
    picked = pick_scenes(chosen, scenes, clips)
    model = chosen.load(device)
    sites = find_sites(model, preset(chosen.sites))
    with progress("recording", scenes * clips) as advance:
        calls = propagation.record(chosen, model, sites, picked, clips=clips, seed=seed, on_clip=advance)
    calls = calls[::every]
    with progress("propagating", len(calls)) as advance:
        sums = propagation.propagate(
            model, sites, calls, names, isolated=isolated, engine=engine, on_call=advance
        )  # fmt: skip
    info = {
        "world": chosen.name,
        "checkpoint_sha256": chosen.checkpoint_sha256(),
        "scenes": [scene.name for scene in picked],
        "clips": clips,
        "seed": seed,
        "calls": len(calls),
        "every": every,
        "timing": {"wall_s": round(time.time() - started, 1)},
    }
    identity = tables.write_info("propagation", info | run_info(names, kernels.name, device), out)
    found = tables.write(studies.PROPAGATION, results.table(sums), out, identity)
    if attention:
        with progress("attention", len(calls)) as advance:
            errors = seen.attention_errors(model, sites, calls, names, engine=engine, on_call=advance)
        tables.write(studies.ATTENTION, results.attention_table(errors), out, identity)
    _print_propagation(found)
    typer.echo(str(out / studies.PROPAGATION.file))


def _print_propagation(found: Any) -> None:
    """Accumulated error of every kernel, block by block, over all steps."""
    from analysis.report.text import percent

    rows = found[(found["quantised"] == "all") & (found["step"] == "all")]
    table = Table(title="residual stream: relative MSE, shrinkage", title_justify="left")
    table.add_column("behind block")
    variants = list(rows["variant"].unique())
    for variant in variants:
        table.add_column(variant, justify="right")
    for seen_at in rows["seen_at"].unique():
        at = rows[rows["seen_at"] == seen_at].set_index("variant")
        cells = [f"{at.loc[v, 'rel_mse']:.1e}, {percent(at.loc[v, 'shrinkage'])}" for v in variants]
        table.add_row(str(seen_at), *cells)
    Console().print(table)
