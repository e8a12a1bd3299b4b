"""`shrinkage attach` and `matrix-game`: measure any script's model unedited."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from analysis.cli.measure import (
    ENGINE,
    OUT,
    OVERWRITE,
    REFERENCE,
    TOKENS,
    VARIANTS,
    command_line,
    console,
)

DEFAULT_PRESET = "matrix-game-3"
SCRIPT = Annotated[
    list[str] | None,
    typer.Argument(metavar="-- SCRIPT.py ARGS...", help="The script and its arguments, or -m MODULE ARGS..."),
]
KERNEL = Annotated[str, typer.Option(help="Run upstream's int8 path with this quantiser: shipped or fixed.")]


def register(app: typer.Typer) -> None:
    # What follows SCRIPT is the script's own, options included.
    app.command(context_settings={"allow_interspersed_args": False})(attach)
    app.command(name="matrix-game")(matrix_game)


def attach(
    out: OUT,
    script: SCRIPT = None,
    preset: Annotated[str | None, typer.Option(help="matrix-game-3, wan, diffusers, hf-bert or hf-llama.")] = None,
    sites: Annotated[str | None, typer.Option(metavar="REGEX", help="Or: a regular expression of layer names.")] = None,
    variants: VARIANTS = "shipped,fixed",
    reference: REFERENCE = "bf16",
    tokens: TOKENS = "all",
    engine: ENGINE = "auto",
    store: Annotated[int, typer.Option(min=0, help="Keep the inputs of the first N calls in OUT/store.")] = 0,
    store_rows: Annotated[int | None, typer.Option(min=1, help="Of those keep so many rows each, seeded.")] = None,
    kernel: KERNEL = "",
    world: Annotated[str, typer.Option(help="What the tables call it; the script's name where empty.")] = "",
    overwrite: OVERWRITE = False,
) -> None:
    """Run a Python script and measure its model's q/k/v/o layers with each quantiser while it runs.

    The script's outputs and exit code are what they are without attach. For several processes:
    torchrun --nproc_per_node 2 --no-python shrinkage attach --out DIR -- SCRIPT.py

    Example: shrinkage attach --out runs/mine --preset matrix-game-3 -- generate.py --size 704*1280
    """
    from analysis.capture.attach import Session
    from analysis.capture.launch import script_target
    from analysis.capture.options import REGEX, Options
    from analysis.sites import SitePattern
    from analysis.sites import preset as named

    if preset and sites:
        raise ValueError("give --preset or --sites, not both")
    pattern = SitePattern(REGEX, _checked(sites)) if sites else named(preset or DEFAULT_PRESET)
    options = Options(
        out=out.absolute(),
        pattern=pattern,
        variants=tuple(variants.split(",")),
        reference=reference,
        tokens=tokens,
        engine=engine,
        store=store,
        store_rows=store_rows,
        kernel=kernel,
        world=world,
        overwrite=overwrite,
        command=command_line(),
    )
    session = Session(options, script_target(script or []), say=_say)
    code = session.run()
    _report(session)
    sys.exit(code)


def _say(text: str) -> None:
    console.print(f"[bold]shrinkage:[/] {escape(text)}", highlight=False, soft_wrap=True)


def _report(session: object) -> None:
    """What the user should know at the end, on stderr: stdout is the script's."""
    from analysis.capture.attach import Session
    from analysis.cli.measure import print_headline

    assert isinstance(session, Session)
    first = session.rank is None or session.rank.index == 0
    if session.per_layer is not None and first:
        with contextlib.redirect_stdout(sys.stderr):
            print_headline(session.per_layer)
        if bad := int(session.per_layer["nonfinite_rows"].sum()):
            _say(f"warning: {bad} row(s) with NaN or Inf were left out of every sum")
        if silent := session.silent():
            _say(f"warning: {len(silent)} matched layer(s) never ran as a module: {', '.join(silent)}")
        _say(f"tables in {session.tables}")
    if session.ending.why:
        _say(f"{session.target.name} ended early ({session.ending.why}); the tables hold its finished calls")
    if session.problem:
        console.print(f"[bold red]error:[/] {escape(session.problem)}", highlight=False, soft_wrap=True)


def _checked(sites: str) -> str:
    try:
        re.compile(sites)
    except re.error as error:
        raise ValueError(f"--sites {sites!r} is not a regular expression: {error}") from None
    return sites


def matrix_game(
    repo: Annotated[Path, typer.Option(help="Matrix-Game-3's folder, the one with generate.py.")],
    ckpt_dir: Annotated[Path, typer.Option(help="The checkpoint's folder.")],
    image: Annotated[Path, typer.Option(help="First frame.")],
    out: OUT,
    more: Annotated[list[str] | None, typer.Argument(metavar="-- ARGS...", help="More of generate.py's own.")] = None,
    prompt: Annotated[str, typer.Option(help="What the scene shows.")] = "",
    size: Annotated[str, typer.Option(help="Height*width, as generate.py takes it.")] = "704*1280",
    iterations: Annotated[int, typer.Option(min=1, help="Clips.")] = 12,
    steps: Annotated[int, typer.Option(min=1, help="Denoising steps; 3 for the distilled model.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="One seed for all three rollouts.")] = 42,
    processes: Annotated[int, typer.Option(min=1, help="GPUs, by upstream's sequence parallelism.")] = 1,
    tokens: TOKENS = "both",
    measure: Annotated[bool, typer.Option(help="Measure both kernels during the bf16 rollout.")] = True,
    closed_loop: Annotated[bool, typer.Option(help="Roll out in int8 too, with either kernel.")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check, print the commands, run nothing.")] = False,
    overwrite: OVERWRITE = False,
) -> None:
    """Matrix-Game-3.0 with your checkpoint: measure it in bf16, then roll it out in bf16, int8 shipped and int8 fixed.

    Example: shrinkage matrix-game --repo Matrix-Game-3 --ckpt-dir weights --image street.png --out runs/mg3
    """
    from analysis.results.folder import check_free
    from analysis.worlds import matrix_game as game

    game.check_repo(repo)
    config = game.check_checkpoint(ckpt_dir)
    if not image.is_file():
        raise FileNotFoundError(f"{image} does not exist; --image is the rollout's first frame")
    arguments = ["--size", size, "--ckpt_dir", str(ckpt_dir.absolute()), "--image", str(image.absolute())]
    arguments += ["--prompt", prompt, "--num_iterations", str(iterations), "--num_inference_steps", str(steps)]
    arguments += ["--ulysses_size", str(processes)] if processes > 1 else []
    jobs = game.commands(
        out.absolute(),
        [*arguments, *(more or [])],
        seed=seed,
        tokens=tokens,
        processes=processes,
        measure=measure,
        closed_loop=closed_loop,
        overwrite=overwrite,
    )
    for job in jobs:
        check_free(out / job.name, overwrite)
    _say(f"{config['num_layers']} blocks of width {config['dim']}: {8 * config['num_layers']} measured layers")
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.getenv("PYTHONPATH", "")])}
    for job in jobs:
        _say(f"{job.purpose}:")
        typer.echo(f"(cd {shlex.quote(str(repo))} && {job})")
        if not dry_run and (code := subprocess.run(job.words, cwd=repo, env=env, check=False).returncode):
            raise ValueError(
                f"{job.name} exited {code}; what it left is in {out / job.name}. Run the command above again"
            )
    if not dry_run:
        _say(f"tables in {out}/*/, videos in {out / 'videos'}")
