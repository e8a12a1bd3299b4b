"""What can be compared: a run's folder, a per_layer.csv, a merged folder, or a folder of many runs.

open_source("runs/mine")             # per_layer.csv, and its calls for resampling
open_source("theirs/per_layer.csv")  # also one that a spreadsheet saved: intervals from its columns
open_source("cluster/rollouts")      # pooled through DuckDB as it is read; resampled over runs
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.results import foreign, resample, schema, sources
from analysis.results.resample import Clusters


@dataclass(frozen=True)
class Source:
    """`table`: per_layer rows, and `clusters`: how many calls (or runs) each rests on. `calls`: what pairing needs."""

    name: str
    table: pd.DataFrame
    clusters: Clusters | None
    calls: pd.DataFrame | None
    unit: str  # of the clusters: 'calls' or 'runs'
    notes: list[str] = field(default_factory=list)


def open_source(path: str | Path, name: str = "", on_runs: Callable[[int], None] | None = None) -> Source:
    """A source by its path. `name`: for the tables, the path itself by default.

    Raises:
        FileNotFoundError: there is no such path.
        ValueError: it is no table and no run, or it is damaged; the message names line and column.
    """
    path, name = Path(path), name or str(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; name a run's folder or a {schema.PER_LAYER}")
    if path.is_file():
        return _table(path, name)
    if not (path / schema.PER_LAYER).is_file():
        return _many(path, name, on_runs)
    source = _table(path / schema.PER_LAYER, name)
    if (path / schema.PER_CALL).is_file():
        frame = schema.read_per_call(path / schema.PER_CALL)
        _one_run(frame, path / schema.PER_CALL)
        labels = frame[["call", "scene", "clip", "step"]].drop_duplicates("call").sort_values("call")
        clusters = resample.by_cluster(frame, "call")
        return Source(
            name, _counted(source.table, clusters), clusters, labels.reset_index(drop=True), "calls", source.notes
        )
    if (path / sources.PER_RUN).is_file():
        frame = schema.conform(pd.read_parquet(path / sources.PER_RUN), schema.PER_LAYER_COLUMNS, str(path))
        clusters = resample.by_cluster(frame, "run_id")
        return Source(name, _counted(source.table, clusters), clusters, None, "runs", source.notes)
    return source


def _table(path: Path, name: str) -> Source:
    reading = foreign.read_table(path)
    if reading.problems:
        raise ValueError(f"{reading.problems[0]}; `shrinkage validate {path}` lists all")
    frame = reading.frame
    absent = {"layer", "variant"} & set(reading.absent)
    if absent:
        raise ValueError(
            f"{path}: no column {' and '.join(sorted(absent))}; make a table of it with: "
            f"shrinkage import {path} --map layer=NAME,rel_mse=NAME --set variant=NAME --out FOLDER"
        )
    _one_run(frame, path)
    double = frame.duplicated(resample.KEY).to_numpy()
    if double.any():
        row = frame.iloc[int(double.argmax())]
        raise ValueError(
            f"{path}: line {reading.lines[int(double.argmax())]} repeats the key "
            f"{', '.join(f'{k}={row[k]}' for k in resample.KEY)}; keep one of the rows"
        )
    calls = frame["calls"].astype("float64").to_numpy()
    frame = frame.assign(clusters=np.where(np.isnan(calls), np.inf, calls))
    return Source(name, frame, None, None, "calls", [f"{name}: {note}" for note in reading.notes])


def _one_run(frame: pd.DataFrame, path: Path) -> None:
    runs = frame["run_id"].unique()
    if len(runs) > 1:
        raise ValueError(
            f"{path} holds {len(runs)} runs ({', '.join(map(str, runs[:3]))}{', ...' if len(runs) > 3 else ''}); "
            "compare them one by one, or `shrinkage merge` them first"
        )


def _counted(table: pd.DataFrame, clusters: Clusters) -> pd.DataFrame:
    counts = pd.Series(clusters.counts.astype(np.float64), index=pd.MultiIndex.from_frame(clusters.keys))
    return table.assign(clusters=counts.reindex(pd.MultiIndex.from_frame(table[resample.KEY])).to_numpy())


def _many(path: Path, name: str, on_runs: Callable[[int], None] | None) -> Source:
    """A folder of runs, pooled."""
    from analysis.results import many, pool

    runs = sources.find_runs([path])
    sources.check_compatible(runs)
    pooled = pool.Pool()
    for frame in many.stream(runs, on_runs):
        pooled.add(frame)
    clusters = pooled.clusters()
    table = _counted(pooled.per_layer(str(runs[0].info.get("world", ""))), clusters)
    return Source(name, table, clusters, None, "runs", [f"{name}: {len(clusters.present)} runs, pooled"])
