"""`shrinkage attach`: measure the attention projections of any Python script's model, nothing in it edited."""

from __future__ import annotations

import contextlib
import re
import sys
from typing import Annotated

import typer

from analysis.cli.measure import ENGINE, OUT, OVERWRITE, REFERENCE, TOKENS, VARIANTS, command_line, console

DEFAULT_PRESET = "matrix-game-3"
SCRIPT = Annotated[
    list[str] | None,
    typer.Argument(metavar="-- SCRIPT.py ARGS...", help="The script and its arguments, or -m MODULE ARGS..."),
]
KERNEL = Annotated[str, typer.Option(help="Run upstream's int8 path with this quantiser: shipped or fixed.")]


def register(app: typer.Typer) -> None:
    # What follows SCRIPT is the script's own, options included.
    app.command(context_settings={"allow_interspersed_args": False})(attach)


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
    from analysis.capture.attach import REGEX, Options, Session
    from analysis.capture.launch import script_target
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
    console.print(f"[bold]shrinkage:[/] {text}", highlight=False, soft_wrap=True)


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
        _say(f"tables in {session.options.out}")
    if session.ending.why:
        _say(f"{session.target.name} ended early ({session.ending.why}); the tables hold its finished calls")
    if session.problem:
        console.print(f"[bold red]error:[/] {session.problem}", highlight=False, soft_wrap=True)


def _checked(sites: str) -> str:
    try:
        re.compile(sites)
    except re.error as error:
        raise ValueError(f"--sites {sites!r} is not a regular expression: {error}") from None
    return sites
