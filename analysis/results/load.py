"""One run from its folder: the tables, read when first asked for. Needs neither torch nor a GPU.

run = load_run("reports/tiny-world")
run.per_layer        # the table people share
run                  # in a notebook: a summary, one row per kernel
"""

from __future__ import annotations

import html
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd

from analysis.results import codes, schema, summary

_SHOWN = {
    "variant": "kernel",
    "reference": "reference",
    "tokens": "tokens",
    "layers": "layers",
    "mean_rel_mse": "mean relative MSE",
    "median_rel_mse": "median relative MSE",
    "mean_cosine": "mean cosine(error, output)",
    "mean_shrinkage": "mean shrinkage",
}


@dataclass(frozen=True, eq=False)
class Run:
    """A run folder. Every table is read once, at first use, and is checked against the schema as it is read."""

    path: Path
    unit: ClassVar[str] = "call"  # what a row of per_call is, and intervals are over

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.resolve().name

    @cached_property
    def per_layer(self) -> pd.DataFrame:
        """per_layer.csv. ValueError names the line and column at fault."""
        return schema.read_per_layer(self.path / schema.PER_LAYER)

    @cached_property
    def per_call(self) -> pd.DataFrame | None:
        """per_call.parquet; None where the folder has none (per_layer.csv may be shared alone)."""
        path = self.path / schema.PER_CALL
        return schema.read_per_call(path) if path.exists() else None

    @cached_property
    def info(self) -> dict[str, Any]:
        """run.json; empty where the folder has none."""
        path = self.path / schema.RUN
        return schema.read_run(path) if path.exists() else {}

    @cached_property
    def codes(self) -> pd.DataFrame | None:
        """codes.parquet, how often each activation code occurs; None where the folder has none."""
        return codes.find(self.path)

    @property
    def world(self) -> str:
        """What was measured."""
        return str(self.per_layer["world"].iloc[0])

    def headline(self) -> pd.DataFrame:
        """One row per kernel, reference and choice of tokens."""
        return summary.headline(self.per_layer)

    def _repr_html_(self) -> str:
        table = self.headline()[list(_SHOWN)].rename(columns=_SHOWN)
        shown = table.to_html(index=False, escape=True, float_format=lambda value: f"{value:.3g}", border=0)
        return f"<p><b>{html.escape(self.name)}</b>, world {html.escape(self.world)}</p>{shown}"


def load_run(path: str | Path) -> Run:
    """The run in a folder.

    Raises:
        ValueError: there is no such folder, or it holds no per_layer.csv; the message says what to do.
    """
    path = Path(path)
    if not path.is_dir():
        found = "a file" if path.exists() else "nothing"
        raise ValueError(
            f"{path}: a run is a folder that holds {schema.PER_LAYER}, found {found}; "
            f"make one with: shrinkage measure --world tiny --out {path}"
        )
    if not (path / schema.PER_LAYER).is_file():
        raise ValueError(
            f"{path}: no {schema.PER_LAYER} in this folder; "
            f"make a run with: shrinkage measure --world tiny --out {path}"
        )
    return Run(path)
