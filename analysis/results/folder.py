"""A run's folder: refuse to overwrite, write the three tables, keep what an interrupted run had.

check_free("out", overwrite=False)                  # FileExistsError if it already holds a run
write_run_folder("out", per_call, info)             # per_call.parquet, per_layer.csv, run.json
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from analysis.results import provenance, schema, summary

TABLES = (schema.PER_LAYER, schema.PER_CALL, schema.RUN)


def check_free(folder: str | Path, overwrite: bool, files: tuple[str, ...] = TABLES) -> None:
    """Raise FileExistsError if `folder` already holds one of `files` and `overwrite` is false."""
    held = [name for name in files if (Path(folder) / name).exists()]
    if held and not overwrite:
        raise FileExistsError(f"{folder} already holds {', '.join(held)}; choose another --out or pass --overwrite")


def write_run_folder(folder: str | Path, per_call: pd.DataFrame, info: dict[str, Any]) -> pd.DataFrame:
    """Write the three tables and return per_layer. Each file appears whole or not at all.

    Raises ValueError when nothing was measured; then nothing is written.
    """
    folder = Path(folder)
    per_layer = summary.summarize(per_call, world=str(info.get("world", "")))
    calls = int(per_call["call"].nunique())
    totals = {
        "schema_version": schema.SCHEMA_VERSION,
        "calls": calls,
        "layers_measured": int(per_layer["layer"].nunique()),
        "rows": int(per_call["rows"].sum()),
        "nonfinite_rows": int(per_call["nonfinite_rows"].sum()),
    }
    schema.write_per_call(per_call, folder / schema.PER_CALL)
    schema.write_per_layer(per_layer, folder / schema.PER_LAYER)
    schema.write_run({"run_id": provenance.run_id(info)} | totals | info, folder / schema.RUN)
    return per_layer
