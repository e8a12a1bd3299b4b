"""`shrinkage rollout` and `propagate`: what the errors do beyond a layer, block by block and in closed loop."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
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
    WORLD,
    Console,
    console,
    pick_device,
    progress,
    run_info,
)

VARIANTS = Annotated[str, typer.Option(help="Quantisers, comma-separated: shipped, fixed, half_even, FILE:FUNCTION.")]
_CORES = os.cpu_count() or 1


def register(app: typer.Typer) -> None:
    app.command()(propagate)
    app.command()(rollout)


def propagate(
    out: OUT,
    world: WORLD = "tiny",
    scenes: SCENES = 2,
    clips: Annotated[int, typer.Option(min=1, help="Clips per scene.")] = 1,
    seed: SEED = 0,
    variants: VARIANTS = "shipped,fixed",
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
    from analysis.report.text import percent, scientific

    rows = found[(found["quantised"] == "all") & (found["step"] == "all")]
    table = Table(title="relative MSE and shrinkage of the residual stream", title_justify="left")
    table.add_column("behind block")
    variants = list(rows["variant"].unique())
    for variant in variants:
        table.add_column(variant, justify="right")
    for seen_at in rows["seen_at"].unique():
        at = rows[rows["seen_at"] == seen_at].set_index("variant")
        cells = [f"{scientific(at.loc[v, 'rel_mse'])}, {percent(at.loc[v, 'shrinkage'])}" for v in variants]
        table.add_row(str(seen_at), *cells)
    Console().print(table)


def rollout(
    out: OUT,
    world: WORLD = "tiny",
    scenes: Annotated[int, typer.Option(min=1, help="Held-out scenes.")] = 4,
    clips: Annotated[int, typer.Option(min=1, help="Clips per scene.")] = 8,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds per scene: --seed, --seed + 1, ...")] = 1,
    seed: SEED = 0,
    variants: VARIANTS = "shipped,fixed",
    metrics: Annotated[str, typer.Option(help="psnr, ssim, flip; comma-separated.")] = "psnr,ssim,flip",
    flip_every: Annotated[
        int | None, typer.Option(min=1, help="FLIP on every Nth frame; default: a clip's last, videos 16.")
    ] = None,
    margin: Annotated[float, typer.Option(help="Margin of the equivalence test of PSNR, in dB.")] = 0.5,
    batch: Annotated[int, typer.Option(min=1, help="Scenes that go through the model together.")] = 1,
    workers: Annotated[int, typer.Option(min=1, help="Processes that score frames.")] = _CORES if _CORES > 2 else 1,
    frames: Annotated[
        tuple[Path, Path, Path] | None,
        typer.Option(
            metavar="BF16 SHIPPED FIXED", help="Score these videos (or folders of them) instead of rolling a world out."
        ),
    ] = None,
    true: Annotated[Path | None, typer.Option(help="With --frames: the game's own video or folder.")] = None,
    other_seed: Annotated[Path | None, typer.Option(help="With --frames: the bf16 model's with another seed.")] = None,
    clip_frames: Annotated[int, typer.Option(min=1, help="With --frames: frames a point of the drift curve.")] = 40,
    video: Annotated[bool, typer.Option(help="Write the first scene side by side, as MP4 and animated WebP.")] = True,
    engine: ENGINE = "auto",
    device: DEVICE = "auto",
    overwrite: OVERWRITE = False,
) -> None:
    """Roll a world out in closed loop with each kernel, paired, and say whether the frames get worse.

    Example: shrinkage rollout --world tiny --out runs/tiny --scenes 16 --seeds 4 --clips 16
    """
    from analysis.results import studies, tables
    from analysis.results.closed_loop import LEAST_SCENES, summarize
    from analysis.results.folder import check_free
    from analysis.rollout.scoring import Scoring

    held = (studies.CLOSED_LOOP, studies.CLOSED_LOOP_FRAMES, studies.CLOSED_LOOP_STATISTICS)
    check_free(out, overwrite, tuple(table.file for table in held))
    if margin <= 0:
        raise ValueError(f"--margin must be positive, got {margin} dB")
    started = time.time()
    chosen = tuple(metrics.split(","))
    info: dict[str, Any] = {"metrics": list(chosen), "margin_db": margin}
    if frames is not None:
        roles = dict(zip(("bf16", "shipped", "fixed"), frames, strict=True))
        roles |= {name: path for name, path in (("true", true), ("other_seed", other_seed)) if path is not None}
        scoring = Scoring(chosen, flip_every or 16, workers)
        compared, described, more = _videos(roles, scoring, clip_frames)
        if video:
            console.print("with --frames no video is written: the three are there already", highlight=False)
    else:
        compared, described, more = _world(
            out, world, scenes, clips, tuple(range(seed, seed + seeds)), variants, chosen, flip_every, batch, workers,
            engine, device, video,
        )  # fmt: skip
    summary = summarize(compared, described, {"psnr_db": margin})
    info |= more
    identity = tables.write_info("closed_loop", info | {"timing": {"wall_s": round(time.time() - started, 1)}}, out)
    tables.write(studies.CLOSED_LOOP_FRAMES, compared, out, identity)
    tables.write(studies.CLOSED_LOOP_STATISTICS, described, out, identity)
    written = tables.write(studies.CLOSED_LOOP, summary, out, identity)
    if compared["scene"].nunique() < LEAST_SCENES:
        console.print(
            f"[bold yellow]warning:[/] {compared['scene'].nunique()} scene(s): fewer than {LEAST_SCENES} independent "
            "pairs, so no interval, no test and no verdict"
        )
    _print(written)
    typer.echo(str(out / studies.CLOSED_LOOP.file))


def _world(
    out: Path, name: str, count: int, clips: int, seeds: tuple[int, ...], variants: str, metrics: tuple[str, ...],
    flip_every: int | None, batch: int, workers: int, engine: str, device: str, video: bool,
) -> tuple[Any, Any, dict[str, Any]]:  # fmt: skip
    from analysis.capture.session import pick_scenes
    from analysis.measure.engine import pick_engine
    from analysis.rollout.closed_loop import Plan, closed_loop
    from analysis.rollout.quantized import quantized
    from analysis.rollout.scoring import Scoring
    from analysis.sites import find_sites, preset
    from analysis.worlds.world import get_world

    chosen = get_world(name)
    scenes = pick_scenes(chosen, count, clips)
    plan = Plan(tuple(variants.split(",")), clips, seeds, batch)
    scoring = Scoring(metrics, flip_every or chosen.clip_frames, workers)
    device = pick_device(device)
    kernels = pick_engine(list(plan.variants), device, engine)
    model = chosen.load(device)
    total = plan.rollouts * clips * -(-count // batch)
    with progress(f"closed loops of {chosen.name}", total) as advance:
        sites = find_sites(model, preset(chosen.sites))
        swap = partial(quantized, sites, engine=engine)
        result = closed_loop(chosen, model, swap, scenes, plan, scoring, advance)
    info = {
        "world": chosen.name,
        "checkpoint_sha256": chosen.checkpoint_sha256(),
        "scenes": [scene.name for scene in scenes],
        "seeds": list(seeds),
        "clips": clips,
        "clip_frames": chosen.clip_frames,
        "flip_every": scoring.flip_every,
        "batch": batch,
    }
    if video:
        _write_videos(out, result.shown, plan.variants[0])
    return result.frames, result.statistics, info | run_info(list(plan.variants), kernels.name, device)


def _videos(roles: dict[str, Path], scoring: Any, clip_frames: int) -> tuple[Any, Any, dict[str, Any]]:
    from analysis.results import provenance
    from analysis.rollout.external import pair_videos, score_videos

    scenes = pair_videos(roles)
    with progress("scoring videos", len(scenes)) as advance:
        compared, described = score_videos(scenes, scoring, clip_frames, advance)
    info = {
        "world": "videos",
        "scenes": list(scenes),
        "roles": sorted(roles),
        "clip_frames": clip_frames,
        "flip_every": scoring.flip_every,
        "versions": provenance.versions(),
        "git_commit": provenance.git_commit(),
    }
    return compared, described, info


def _write_videos(out: Path, shown: dict[str, Any], subject: str) -> None:
    from analysis.rollout import video as videos

    panels = videos.comparison(shown, 0, subject)
    rate = 17.5
    videos.write_webp(out / "closed_loop.webp", videos.side_by_side(panels), rate)
    try:
        videos.write_mp4(out / "closed_loop.mp4", videos.side_by_side(panels, scale=4), rate)
    except ValueError as error:
        console.print(f"[bold yellow]warning:[/] no MP4: {error}")


def _print(summary: Any) -> None:
    """The PSNR rows over the whole rollout, on stdout."""
    from analysis.report.text import EMPTY, plain, signed

    table = Table(title="closed loop: PSNR over all clips, paired by scene", title_justify="left")
    for name in ("kernel", "against", "minus that of"):
        table.add_column(name, no_wrap=True)
    for name in ("PSNR (dB)", "difference (dB) [95 %]"):
        table.add_column(name, justify="right", no_wrap=name.startswith("diff"))
    table.add_column("verdict", no_wrap=True)
    rows = summary[(summary["metric"] == "psnr_db") & (summary["window"] == "all")]
    for row in rows.to_dict("records"):
        ends = (row["difference_lo"], row["difference_hi"])
        shown = signed(f"{row['difference']:+.2f}")
        shown += "" if any(end != end for end in ends) else f" [{', '.join(signed(f'{end:.2f}') for end in ends)}]"
        table.add_row(
            *(str(row[k]) for k in ("variant", "against", "baseline")),
            plain(row["value"]),
            shown,
            row["verdict"] or EMPTY,
        )
    Console().print(table)
