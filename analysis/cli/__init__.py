"""The `shrinkage` command. The only place with printing, progress bars, default paths and exit codes.

One file a command group; each has `register(app)`. A ValueError, FileNotFoundError or FileExistsError from below is
the user's to mend and is shown as one line; anything else is a defect here and keeps its traceback.
"""

from __future__ import annotations

import importlib
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

import analysis

GROUPS = ("measure", "attach", "bench", "world", "report", "audit", "ablate", "propagate", "rollout", "share")
console = Console(stderr=True)
app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown"
)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    """Error analysis of int8 attention projections: what a rounding defect does to a model's outputs."""
    if version:
        typer.echo(f"shrinkage {analysis.__version__}")
        raise typer.Exit


def build() -> typer.Typer:
    for group in GROUPS:
        importlib.import_module(f"analysis.cli.{group}").register(app)
    return app


def main() -> None:
    """Entry point: exit 0 only on success, 1 on a user's error, 130 after Ctrl-C."""
    try:
        build()()
    except (ValueError, FileNotFoundError, FileExistsError) as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(1)
