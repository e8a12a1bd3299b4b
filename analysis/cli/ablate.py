"""`shrinkage ablate`: one named change to one stage at a time, and the theory beside it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from analysis.cli.measure import (
    DEVICE,
    OUT,
    OVERWRITE,
    SCENES,
    SEED,
    WORLD,
    Console,
    console,
    device_name,
    pick_device,
    progress,
)


def register(app: typer.Typer) -> None:
    app.command()(ablate)


def ablate(
    out: OUT,
    store: Annotated[
        Path | None, typer.Argument(help="Store of `shrinkage capture`; default: roll the world out.")
    ] = None,
    world: WORLD = "tiny",
    scenes: SCENES = 2,
    clips: Annotated[int, typer.Option(min=1, help="Clips per scene.")] = 2,
    seed: SEED = 0,
    factors: Annotated[
        str | None, typer.Option(help="Comma-separated; default: all. An unknown one lists them.")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows of each input that are measured, seeded.")] = 128,
    every: Annotated[int, typer.Option(min=1, help="Measure every Nth forward pass.")] = 1,
    theory: Annotated[bool, typer.Option(help="Also compare with the closed forms and take the error apart.")] = True,
    device: DEVICE = "auto",
    overwrite: OVERWRITE = False,
) -> None:
    """Change one stage of the int8 layer at a time: which factors matter, and where the error comes from.

    Example: shrinkage ablate --world tiny --out runs/tiny --factors weight_scale,activation_granularity
    """
    from analysis.measure.ablation import Ablation
    from analysis.measure.theory import Theory
    from analysis.results import studies, tables
    from analysis.results.folder import check_free
    from analysis.rollout.layer_studies import Collector

    written = (studies.ABLATION, *((studies.THEORY,) if theory else ()))
    check_free(out, overwrite, tuple(table.file for table in written))
    started = time.time()
    device = pick_device(device)
    ablation = Ablation(factors.split(",") if factors else None, rows, seed)
    collector = Collector([ablation, *([Theory(max(1, rows // 4), seed)] if theory else [])], every)
    if store is None:
        info = _online(collector, world, scenes, clips, seed, device)
    else:
        info = _stored(collector, store, device)
    info |= {
        "rows": rows,
        "every": every,
        "factors": sorted({change.factor for change in ablation.changes}),
        "seed": seed,
    }
    info |= _provenance(device) | {"timing": {"wall_s": round(time.time() - started, 1)}}
    identity = tables.write_info("ablation", info, out)
    found = tables.write(studies.ABLATION, _ablation_table(collector, ablation), out, identity)
    if theory:
        tables.write(studies.THEORY, _theory_table(collector), out, identity)
    if collector.calls < 3:
        console.print(f"[bold yellow]warning:[/] {collector.calls} call(s): too few for intervals, no verdict")
    _print(found)
    typer.echo(str(out / studies.ABLATION.file))


def _online(collector: Any, name: str, count: int, clips: int, seed: int, device: str) -> dict[str, Any]:
    from analysis.capture.session import pick_scenes, rollout_into
    from analysis.sites import find_sites, preset
    from analysis.worlds.world import get_world

    world = get_world(name)
    scenes = pick_scenes(world, count, clips)
    model = world.load(device)
    sites = find_sites(model, preset(world.sites))
    with progress("ablation", count * clips) as advance:
        rollout_into(collector, world, model, sites, scenes, clips=clips, seed=seed, on_clip=advance)
    return {
        "world": world.name,
        "checkpoint_sha256": world.checkpoint_sha256(),
        "scenes": [scene.name for scene in scenes],
        "clips": clips,
    }


def _stored(collector: Any, folder: Path, device: str) -> dict[str, Any]:
    from analysis.capture.store import Store
    from analysis.rollout.layer_studies import read_store

    store = Store(folder)
    with progress("ablation", len(store.layers)) as advance:
        for _ in read_store(collector, store, device):
            advance()
    return {"world": store.info.get("world", "store"), "sampling": store.manifest["sampling"]} | {
        k: store.info[k] for k in ("checkpoint_sha256", "scenes", "clips") if k in store.info
    }


def _provenance(device: str) -> dict[str, Any]:
    from analysis.cli.measure import command_line
    from analysis.results import provenance

    return {
        "device": device_name(device),
        "versions": provenance.versions(),
        "git_commit": provenance.git_commit(),
        "command": command_line(),
    }


def _site(site: Any) -> str:
    return f"{site.attention} {site.projection}".strip() or "layers"


def _ablation_table(collector: Any, ablation: Any) -> Any:
    from analysis.measure.ablation import ROUNDINGS
    from analysis.results.ablation import Cell, Sums, table

    sites, found = collector.stacked(0)
    sums = found.double().numpy()  # [calls, layers, settings, 2]
    control = next(change for change in ablation.changes if change.factor == "none")
    cells = [
        Cell(c.factor, c.level, c.stage, r.value, ablation.index(c, r), ablation.index(control, r))
        for r in ROUNDINGS
        for c in ablation.changes
    ]
    measured = Sums(sums[..., 0], sums[..., 1], [_site(s) for s in sites], ablation.rows * collector.calls)
    return table(measured, cells)


def _theory_table(collector: Any) -> Any:
    import pandas as pd

    from analysis.measure.theory import ROUNDINGS, SUMS
    from analysis.results.theory import table

    sites, found = collector.stacked(1)
    layers = pd.DataFrame(
        [{"layer": s.name, "block": s.block, "attention": s.attention, "projection": s.projection} for s in sites]
    )
    return table(layers, found.double().numpy(), SUMS, [r.value for r in ROUNDINGS])


def _print(found: Any) -> None:
    """Overall rows, one line a change: both roundings beside each other. Intervals stand in the table's file."""
    from analysis.report.text import signed

    table = Table(title="change of the mean relative MSE, all sites", title_justify="left")
    for name in ("factor", "level"):
        table.add_column(name, no_wrap=True)
    for name in ("shipped", "fixed"):
        table.add_column(name, justify="right", no_wrap=True)
        table.add_column("< 2 %")
    words = {"supported": "yes", "rejected": "no", "undecided": "?"}
    overall = found[found["site"] == "all"]
    for (factor, level), group in overall.groupby(["factor", "level"], sort=False):
        cells: list[str] = []
        for rounding in ("shipped", "fixed"):
            row = group[group["rounding"] == rounding]
            change = 0.0 if row.empty else 100 * float(row["change"].iloc[0])
            cells += ["", ""] if row.empty else [signed(f"{change:+.1f}") + " %", words[row["verdict"].iloc[0]]]
        if any(cells):
            table.add_row(str(factor), str(level), *cells)
    Console().print(table)
