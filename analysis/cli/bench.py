"""`shrinkage bench`: what measuring costs, and with `--kernels` what the fix costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from analysis.cli.measure import (
    DEVICE,
    OVERWRITE,
    VARIANTS,
    WORLD,
    command_line,
    console,
    device_name,
    pick_device,
)

SHORT = {"float32": "fp32", "bfloat16": "bf16"}


def register(app: typer.Typer) -> None:
    app.command()(bench)


def bench(
    out: Annotated[Path | None, typer.Option(help="JSON file for the times; without it they are only printed.")] = None,
    kernels: Annotated[bool, typer.Option("--kernels", help="Time the row quantisers: is the fix free?")] = False,
    theirs: Annotated[
        str, typer.Option(metavar="FILE:FUNCTION", help="With --kernels: your own quantiser beside them.")
    ] = "",
    rows: Annotated[
        str,
        typer.Option(
            help="Rows; with --kernels several, comma-separated. Default: the model's on a GPU, few on a CPU."
        ),
    ] = "",
    features: Annotated[int, typer.Option(min=0, help="Width; 0: the model's, and 256 for a layer on a CPU.")] = 0,
    repeats: Annotated[int, typer.Option(min=0, help="Rounds; 0: 7, with --kernels 72 on a GPU and 18 on a CPU.")] = 0,
    world: WORLD = "tiny",
    variants: VARIANTS = "shipped,fixed",
    device: DEVICE = "auto",
    overwrite: OVERWRITE = False,
) -> None:
    """What measuring costs: one layer beside its GEMMs, and a world's forward passes plain and measured.

    With --kernels what the fix costs: the quantisers `shipped` and `fixed` over Matrix-Game-3.0's shapes.

    Example: shrinkage bench --kernels --out runs/quantizers.json
    """
    if theirs and not kernels:
        raise ValueError("--theirs needs --kernels")
    sizes = _sizes(rows)
    if len(sizes) > 1 and not kernels:
        raise ValueError(f"--rows {rows}: several need --kernels; one layer has one number of rows")
    if out is not None:
        from analysis.results.folder import check_free

        check_free(out.parent, overwrite, (out.name,))
    chosen = pick_device(device)
    if kernels:
        record = _kernels(chosen, sizes, features, repeats, theirs)
    else:
        record = _measuring(chosen, sizes, features, repeats or 7, world, variants.split(","))
    if out is not None:
        from analysis.results.schema import replacing

        with replacing(out) as temporary:
            temporary.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        typer.echo(str(out))


def _sizes(rows: str) -> list[int]:
    try:
        sizes = [int(part) for part in rows.split(",") if part.strip()]
    except ValueError:
        sizes = [-1]
    if any(size < 1 for size in sizes):
        raise ValueError(f"--rows {rows}: expected positive numbers, comma-separated, such as 4400,512")
    return sizes


def _provenance(device: str) -> dict[str, Any]:
    import torch

    from analysis.results import provenance

    return {
        "device": device_name(device),
        "threads": torch.get_num_threads() if device == "cpu" else None,
        "versions": provenance.versions(),
        "git_commit": provenance.git_commit(),
        "command": command_line(),
    }


def _kernels(device: str, sizes: list[int], features: int, repeats: int, theirs: str) -> dict[str, Any]:
    from analysis.measure import kernel_bench

    gpu = device != "cpu"
    rounds = repeats or (kernel_bench.ROUNDS if gpu else kernel_bench.ROUNDS // 4)
    found = kernel_bench.bench_quantizers(device, sizes, features or kernel_bench.FEATURES, rounds, theirs)
    record = _provenance(device) | found
    title = f"{record['device']}: {found['what']}; copy {found['copy_gb_per_s']:.0f} GB/s"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("", "µs", "GB/s", "of copy", "to shipped [95 %]", "layer"):
        table.add_column(name, justify="right" if name else "left", no_wrap=bool(name), overflow="fold")
    for shape in found["shapes"]:
        table.add_row(f"[bold]{shape['rows']}x{shape['features']} {SHORT[shape['dtype']]}[/]")
        for name, timing in shape["times"].items():
            ratio = shape["ratio_to_shipped"].get(name)
            shown = f"{ratio['median']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]" if ratio else ""
            layer = shape["layer_to_shipped"].get(name)
            speed = (f"{shape['gb_per_s'][name]:.{0 if gpu else 1}f}", f"{shape['of_copy'][name]:.2f}")
            table.add_row(name, _micro(timing["median_s"]), *speed, escape(shown), f"{layer:.3f}" if layer else "")
        table.add_section()
    console.print(table)
    return record


def _micro(seconds: float) -> str:
    return f"{1e6 * seconds:.{2 if seconds < 1e-4 else 0}f}"


def _measuring(
    device: str, sizes: list[int], features: int, repeats: int, world: str, names: list[str]
) -> dict[str, Any]:
    from analysis.capture.forward_bench import bench_forward, first_call
    from analysis.measure.bench import bench_layer
    from analysis.sites import preset
    from analysis.worlds.world import get_world

    gpu = device != "cpu"
    width = features or (3072 if gpu else 256)
    (rows,) = sizes or [17600 if gpu else 768]
    layer = bench_layer(rows, width, width, device, names, repeats=3 * repeats)
    played = get_world(world)
    model, scene = played.load(device), played.scenes()[0]
    run = first_call(model, lambda: played.rollout(model, [scene], clips=1, seed=0))
    forward = bench_forward(run, preset(played.sites), device, repeats, names)
    shape = f"{layer['rows']}x{layer['in_features']}x{layer['out_features']}"
    console.print(_times(f"one layer, {shape}, {layer['engine']}", layer["times"], layer["ratio_to_gemms"], "GEMMs"))
    title = f"world {played.name}, a forward pass, {forward['layers']} layers"
    console.print(_times(title, forward["times"], forward["ratio_to_plain"], "plain"))
    return _provenance(device) | {
        "world": played.name,
        "checkpoint_sha256": played.checkpoint_sha256(),
        "layer": layer,
        "forward": forward,
    }


def _times(title: str, times: dict[str, Any], ratios: dict[str, float], base: str) -> Table:
    table = Table(title=title)
    for name in ("", "median", "quartiles", f"of {base}"):
        table.add_column(name, justify="right" if name else "left")
    for name, timing in times.items():
        low, high = (f"{1e3 * timing[k]:.3f}" for k in ("low_s", "high_s"))
        table.add_row(name, f"{1e3 * timing['median_s']:.3f} ms", f"{low} .. {high}", f"{ratios[name]:.3f}x")
    return table
