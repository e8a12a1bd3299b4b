"""`shrinkage report`: a run's tables as a page, its Markdown twin, and figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RUNS = Annotated[
    list[Path],
    typer.Argument(
        metavar="RUN...", help="Folders that `shrinkage measure` wrote; a folder of many such runs is pooled."
    ),
]
OUT = Annotated[Path, typer.Option(help="Folder for index.html, report.md and figures/; may be the run's own.")]
OVERWRITE = Annotated[bool, typer.Option("--overwrite", help="Replace the report of other runs.")]


def register(app: typer.Typer) -> None:
    app.command()(report)


def report(runs: RUNS, out: OUT, overwrite: OVERWRITE = False) -> None:
    """Write the report of one or several runs: the issue's claims, figures, a table of layers, provenance.

    Example: shrinkage report runs/tiny --out runs/tiny
    """
    from analysis.report.html import build_report

    built = build_report(runs, out, overwrite)
    typer.echo(str(built.index))
    for line in built.headlines:
        typer.echo(line)
