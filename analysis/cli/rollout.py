"""`shrinkage rollout`: closed loops with each kernel, or videos that another program made, scored and judged."""

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
    SEED,
    VARIANTS,
    WORLD,
    Console,
    console,
    pick_device,
    progress,
    run_info,
)

FRAME_RATE = 17.5  # frames a second of the embedded world
_CORES = os.cpu_count() or 1


def register(app: typer.Typer) -> None:
    app.command()(rollout)


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
    video: Annotated[bool, typer.Option(help="Show the first scene: sheet, animated WebP, MP4.")] = True,
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
        _write_pictures(out, result.shown, scenes[0], plan.variants[0])
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


def _write_pictures(out: Path, shown: dict[str, Any], scene: Any, subject: str) -> None:
    """The first scene: a sheet, an animated preview and a video, all modes beside each other."""
    from analysis.results.schema import replacing
    from analysis.rollout import video as videos
    from analysis.worlds.contact_sheet import contact_sheet

    panels = videos.comparison(shown, 0, subject)
    count = len(panels["bf16"])
    with replacing(out / "closed_loop.png") as temporary:
        contact_sheet({"game": scene.frames[:count]} | panels).save(temporary)
    videos.write_webp(out / "closed_loop.webp", videos.side_by_side(panels, scale=2), FRAME_RATE)
    try:
        videos.write_mp4(out / "closed_loop.mp4", videos.side_by_side(panels, scale=4), FRAME_RATE)
    except ValueError as error:
        console.print(f"[bold yellow]warning:[/] no MP4: {error}")


def _print(summary: Any) -> None:
    """The PSNR rows over the whole rollout, on stdout."""
    from analysis.report.text import EMPTY, signed

    table = Table(title="closed loop: PSNR over all clips, paired by scene", title_justify="left")
    for name in ("kernel", "against", "minus that of"):
        table.add_column(name, no_wrap=True)
    table.add_column("difference (dB) [95 %]", justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    rows = summary[(summary["metric"] == "psnr_db") & (summary["window"] == "all")]
    for row in rows.to_dict("records"):
        ends = (row["difference_lo"], row["difference_hi"])
        shown = signed(f"{row['difference']:+.2f}")
        shown += "" if any(end != end for end in ends) else f" [{', '.join(signed(f'{end:.2f}') for end in ends)}]"
        table.add_row(
            *(str(row[k]) for k in ("variant", "against", "baseline")),
            shown,
            row["verdict"] or EMPTY,
        )
    Console().print(table)
