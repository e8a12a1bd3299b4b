"""`shrinkage measure`, `capture` and `replay`: from a rollout, or a store of one, to a run's tables."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

console = Console(stderr=True)

OUT = Annotated[Path, typer.Option(help="Folder for the tables.")]
WORLD = Annotated[str, typer.Option(help="World to roll out.")]
SCENES = Annotated[int, typer.Option(min=1, help="Held-out scenes to roll out.")]
CLIPS = Annotated[int, typer.Option(min=1, help="Clips per scene, each fed the frames of the one before.")]
SEED = Annotated[int, typer.Option(help="Seed of the sampling noise.")]
ENGINE = Annotated[str, typer.Option(help="auto (Triton on CUDA, else reference), triton or reference.")]
DEVICE = Annotated[str, typer.Option(help="cpu, cuda, or auto: cuda where there is one.")]
REFERENCE = Annotated[str, typer.Option(help="bf16, as_run (the layer's own output) or fp64.")]
VARIANTS = Annotated[str, typer.Option(help="Quantisers, comma-separated: shipped, fixed, half_even, FILE:FUNCTION.")]
TOKENS = Annotated[str, typer.Option(help="all, valid (without padding) or both.")]
OVERWRITE = Annotated[bool, typer.Option("--overwrite", help="Replace a run that is already there.")]

DEFAULT_SCENES, DEFAULT_CLIPS = 2, 4
INTERRUPTED = 130


def register(app: typer.Typer) -> None:
    app.command()(measure)
    app.command()(capture)
    app.command()(replay)


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """A progress bar on a terminal, nothing elsewhere; yields the function that advances it."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


def pick_device(device: str) -> str:
    """'auto' -> cuda where there is one. ValueError for cuda where there is none."""
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise ValueError(f"unknown device {device!r}; known: auto, cpu, cuda, cuda:N") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {device!r}: this machine has no CUDA device; use --device cpu")
    return device


def device_name(device: str) -> str:
    """The GPU's name, or 'cpu'."""
    import torch

    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else torch.device(device).type


def command_line() -> str:
    return shlex.join(["shrinkage", *sys.argv[1:]])


def run_info(variants: list[str], engine_name: str, device: str) -> dict[str, Any]:
    """Provenance that every run shares."""
    from analysis.kernels import registry
    from analysis.results import provenance

    return {
        "variants": {v: registry.source_sha256(v) for v in variants},
        "engine": engine_name,
        "device": device_name(device),
        "versions": provenance.versions(),
        "git_commit": provenance.git_commit(),
        "command": command_line(),
    }


def save(
    sink: Any, out: Path, info: dict[str, Any], expected: list[str], complete: bool, started: float
) -> None:  # fmt: skip
    """Write the run folder and print the headline. Layers that never ran are listed and warned about."""
    from analysis.results import codes, folder, provenance

    silent = [name for name in expected if name not in sink.measured]
    info = info | {
        "complete": complete,
        "layers_expected": len(expected),
        "layers_silent": silent,
        "timing": {
            "started": datetime.fromtimestamp(started, UTC).isoformat(timespec="seconds"),
            "wall_s": round(time.time() - started, 1),
        },
    }
    run_id = provenance.run_id(info)
    per_layer = folder.write_run_folder(out, sink.table(run_id), info)
    codes.write(sink.code_table(), out, run_id)
    if silent:
        console.print(f"[bold yellow]warning:[/] {len(silent)} matched layer(s) never ran: {', '.join(silent)}")
    if bad := int(per_layer["nonfinite_rows"].sum()):
        console.print(f"[bold yellow]warning:[/] {bad} row(s) with NaN or Inf were left out of every sum")
    if not complete:
        console.print("[bold yellow]warning:[/] interrupted; the tables hold the finished calls, marked incomplete")
    print_headline(per_layer)
    typer.echo(str(out / "per_layer.csv"))


def print_headline(per_layer: Any) -> None:
    from analysis.results.summary import headline

    table = Table(title=f"world: {per_layer['world'].iloc[0]}")
    for name in ("variant", "reference", "tokens", "layers", "mean rel. MSE", "pooled", "median"):
        table.add_column(name, justify="left" if name in ("variant", "reference", "tokens") else "right")
    table.add_column("error-output cosine", justify="right")
    table.add_column("shrinkage", justify="right")
    for row in headline(per_layer).to_dict("records"):
        table.add_row(
            *(str(row[k]) for k in ("variant", "reference", "tokens", "layers")),
            *(f"{row[k]:.3e}" for k in ("mean_rel_mse", "pooled_rel_mse", "median_rel_mse")),
            f"{row['mean_cosine']:+.3f} ({row['min_cosine']:+.3f} .. {row['max_cosine']:+.3f})",
            f"{100 * row['mean_shrinkage']:+.3f} %",
        )
    out = Console()
    (out if out.is_terminal else Console(width=130)).print(table)


def measure(
    out: OUT,
    world: WORLD = "tiny",
    scenes: SCENES = DEFAULT_SCENES,
    clips: CLIPS = DEFAULT_CLIPS,
    seed: SEED = 0,
    variants: VARIANTS = "shipped,fixed",
    reference: REFERENCE = "bf16",
    tokens: TOKENS = "all",
    engine: ENGINE = "auto",
    device: DEVICE = "auto",
    overwrite: OVERWRITE = False,
) -> None:
    """Roll a world out and measure every q/k/v/o layer with each quantiser, inside the forward pass.

    Example: shrinkage measure --world tiny --out runs/tiny --scenes 2 --clips 8
    """
    from analysis.capture.online import OnlineSink
    from analysis.measure.replay import Replay
    from analysis.results.folder import check_free

    check_free(out, overwrite)
    names = variants.split(",")
    device = pick_device(device)
    replayer = Replay(names, reference, device, engine)
    sink = OnlineSink(replayer, tokens)
    started = time.time()
    rollout = _Rollout(world, scenes, clips, seed, device)
    info = rollout.info | run_info(names, replayer.engine.name, device) | {"reference": reference, "tokens": tokens}
    frames = rollout.run(sink, "measuring")
    if frames is None and sink.calls == 0:
        raise typer.Exit(INTERRUPTED)
    save(sink, out, info, rollout.expected, frames is not None, started)
    if frames is None:
        raise typer.Exit(INTERRUPTED)
    rollout.save_contact_sheet(frames, out / "contact_sheet.png")


class _Rollout:
    """The world's side of `measure` and `capture`: scenes, model, sites, and the loop with its progress bar."""

    def __init__(self, world: str, scenes: int, clips: int, seed: int, device: str) -> None:
        from analysis.capture.session import pick_scenes
        from analysis.sites import find_sites, preset
        from analysis.worlds.world import get_world

        self.world = get_world(world)
        self.scenes = pick_scenes(self.world, scenes, clips)
        self.model = self.world.load(device)
        self.sites = find_sites(self.model, preset(self.world.sites))
        self.expected = [site.name for site in self.sites]
        self.clips, self.seed = clips, seed
        self.info: dict[str, Any] = {
            "world": self.world.name,
            "checkpoint_sha256": self.world.checkpoint_sha256(),
            "scenes": [scene.name for scene in self.scenes],
            "clips": clips,
            "seed": seed,
            "sites": self.world.sites,
            "layers_found": len(self.sites),
        }

    def run(self, sink: Any, what: str) -> Any:
        """Predicted frames [scenes, T, H, W, 3], or None after Ctrl-C (the sink keeps the finished calls)."""
        from analysis.capture.session import rollout_into

        try:
            with progress(f"{what} {self.world.name}", len(self.scenes) * self.clips) as advance:
                return rollout_into(
                    sink,
                    self.world,
                    self.model,
                    self.sites,
                    self.scenes,
                    clips=self.clips,
                    seed=self.seed,
                    on_clip=advance,
                )
        except KeyboardInterrupt:
            return None

    def save_contact_sheet(self, frames: Any, path: Path) -> None:
        from analysis.results.schema import replacing
        from analysis.worlds.contact_sheet import contact_sheet

        rows = {}
        for scene, predicted in zip(self.scenes, frames, strict=True):
            rows[f"{scene.name}: game"] = scene.frames[: len(predicted)]
            rows[f"{scene.name}: {self.world.name}"] = predicted
        with replacing(path) as temporary:
            contact_sheet(rows).save(temporary)


def capture(
    out: Annotated[Path, typer.Option(help="Folder for the store.")],
    world: WORLD = "tiny",
    scenes: SCENES = 1,
    clips: CLIPS = 1,
    seed: SEED = 0,
    rows: Annotated[int | None, typer.Option(min=1, help="Keep this many rows of each input, seeded.")] = None,
    outputs: Annotated[bool, typer.Option("--outputs", help="Also keep each layer's output (for as_run).")] = False,
    device: DEVICE = "auto",
    overwrite: OVERWRITE = False,
) -> None:
    """Roll a world out and store every q/k/v/o input and weight, to be replayed later.

    Example: shrinkage capture --world tiny --out runs/store --clips 2 --rows 256
    """
    import shutil

    from analysis.capture.store import MANIFEST, StoreSink
    from analysis.results.folder import check_free

    check_free(out, overwrite, (MANIFEST,))
    rollout = _Rollout(world, scenes, clips, seed, pick_device(device))
    if (out / MANIFEST).exists():
        for part in ("calls", "layers"):
            shutil.rmtree(out / part, ignore_errors=True)
        (out / MANIFEST).unlink()
    sink = StoreSink(out, rollout.info | {"expected": rollout.expected}, rows, seed, outputs)
    frames = rollout.run(sink, "capturing")
    sink.close(complete=frames is not None)
    console.print(f"{len(sink.manifest['calls'])} calls, {len(sink.manifest['layers'])} layers")
    typer.echo(str(out / MANIFEST))
    if frames is None:
        raise typer.Exit(INTERRUPTED)


def replay(
    store: Annotated[Path, typer.Argument(help="Folder that `shrinkage capture` wrote.")],
    out: OUT,
    variants: VARIANTS = "shipped,fixed",
    reference: REFERENCE = "bf16",
    tokens: TOKENS = "all",
    engine: ENGINE = "auto",
    device: DEVICE = "auto",
    overwrite: OVERWRITE = False,
) -> None:
    """Replay a store with each quantiser: the same tables as `measure`, from activations on disk.

    Example: shrinkage replay runs/store --out runs/replayed --variants shipped,fixed,half_even
    """
    from analysis.capture.online import OnlineSink
    from analysis.capture.store import Store, replay_store
    from analysis.measure.replay import Replay
    from analysis.results.folder import check_free

    check_free(out, overwrite)
    started = time.time()
    source = Store(store)
    names = variants.split(",")
    device = pick_device(device)
    replayer = Replay(names, reference, device, engine)
    sink = OnlineSink(replayer, tokens)
    info = {k: v for k, v in source.info.items() if k != "expected"} | {"sampling": source.manifest["sampling"]}
    info |= run_info(names, replayer.engine.name, device) | {"reference": reference, "tokens": tokens}
    complete = bool(source.manifest["complete"])
    try:
        with progress("replaying", len(source.layers)) as advance:
            for _ in replay_store(source, sink, device):
                advance()
    except KeyboardInterrupt:
        if sink.measured:
            save(sink, out, info, source.info["expected"], False, started)
        raise typer.Exit(INTERRUPTED) from None
    save(sink, out, info, source.info["expected"], complete, started)
