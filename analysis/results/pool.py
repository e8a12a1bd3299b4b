"""Different runs of the same thing, stacked and added up.

    merge_runs(find_runs(["cluster/rollouts"]), "pooled", command="shrinkage merge ...")

leaves `per_layer.csv` (one row a layer and kernel, summed over all runs: every command that takes a run takes it),
`per_run.parquet` (the same columns, one row a run, layer and kernel), `runs.csv` (the headline of each run) and
`run.json`. Intervals in per_layer.csv are over runs: calls of one rollout have more in common than rollouts have.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from analysis.results import many, resample, schema, summary
from analysis.results.checks import plain
from analysis.results.resample import Clusters
from analysis.results.sources import PER_RUN, RunFolder, check_compatible

RUNS = "runs.csv"
_OF_ONE_RUN = ("command", "timing", "git_commit", "rank", "launch", "ended", "exit_code", "calls_per_rank")
_RUN_FIELDS = ("seed", "device", "engine", "complete")


class Pool:
    """Sums of many runs by layer and kernel. Memory: 136 bytes a run, layer and kernel."""

    def __init__(self) -> None:
        self._layers: dict[tuple[str, ...], int] = {}
        self._shapes: dict[Any, tuple[tuple[Any, ...], str]] = {}
        self._parts: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
        self._runs: list[str] = []

    def add(self, frame: pd.DataFrame) -> None:
        """Add per_layer rows of whole runs. ValueError where a layer has another shape or place than in another run."""
        distinct = frame.drop_duplicates(["layer", *schema.LABEL_NAMES])
        shapes = zip(*(distinct[name] for name in (*schema.LABEL_NAMES, "layer", "run_id")), strict=True)
        for *labels, layer, run_id in shapes:
            shape, other = self._shapes.setdefault(layer, (tuple(labels), run_id))
            for name, here, there in zip(schema.LABEL_NAMES, labels, shape, strict=True):
                if here != there:
                    raise ValueError(
                        f"layer {layer!r}: {name} is {plain(here)!r} in run {run_id}, {plain(there)!r} in run {other}; "
                        "merge runs of one model only"
                    )
        group = frame.groupby(resample.KEY, sort=False, dropna=False).ngroup().to_numpy()
        keys = frame.iloc[np.unique(group, return_index=True)[1]][resample.KEY].itertuples(index=False, name=None)
        layers = np.array([self._layers.setdefault(key, len(self._layers)) for key in keys])[group]
        codes, names = pd.factorize(frame["run_id"])
        sums = frame[schema.SUM_NAMES].to_numpy(np.float64)
        self._parts.append((layers, codes + len(self._runs), frame["calls"].to_numpy(np.int64), sums))
        self._runs += list(names)

    def clusters(self) -> Clusters:
        """Sums by run and layer."""
        layers, runs, _, sums = (np.concatenate(part) for part in zip(*self._parts, strict=True))
        keys = pd.DataFrame(list(self._layers), columns=resample.KEY)
        shape = (len(self._runs), len(keys))
        table = np.zeros((*shape, len(schema.SUM_NAMES)))
        present = np.zeros(shape, dtype=bool)
        table[runs, layers], present[runs, layers] = sums, True
        at = schema.LABEL_NAMES.index("in_features")
        features = np.array([self._shapes[layer][0][at] for layer in keys["layer"]], dtype=np.float64)
        return Clusters(keys, table, present, features)

    def per_layer(self, world: str) -> pd.DataFrame:
        """The pooled table. Runs add in the order they came; intervals are over runs, empty below three of them."""
        if not self._parts:
            raise ValueError("no runs were added: nothing to pool")
        clusters = self.clusters()
        frame = clusters.keys.copy()
        for number, name in enumerate(schema.LABEL_NAMES):
            frame[name] = [self._shapes[layer][0][number] for layer in frame["layer"]]
        for number, column in enumerate(schema.SUMS):
            values = clusters.sums[:, :, number]
            total = values.max(axis=0) if column.name == "max_abs_e" else values.sum(axis=0)
            frame[column.name] = pd.Series(total).astype(column.dtype)
        layers, calls = (np.concatenate([part[at] for part in self._parts]) for at in (0, 2))
        frame["calls"] = np.bincount(layers, weights=calls, minlength=len(frame)).astype(np.int64)
        frame = frame.assign(**summary.metrics(frame))
        for name, draws in resample.draw(clusters, schema.INTERVAL_OF).items():
            frame[f"{name}_lo"], frame[f"{name}_hi"] = summary.percentile_interval(draws)
        frame = frame.assign(schema_version=schema.SCHEMA_VERSION, world=world, run_id=pooled_id(self._runs))
        frame = schema.conform(
            frame[[c.name for c in schema.PER_LAYER_COLUMNS]], schema.PER_LAYER_COLUMNS, "pooled runs"
        )
        order = ["reference", "tokens", "block", "attention", "projection", "layer", "variant"]
        return frame.sort_values(order, kind="stable").reset_index(drop=True)


def pooled_id(run_ids: Iterable[str]) -> str:
    """The run id of a pool: the same whatever the order of its runs."""
    return hashlib.sha256(",".join(sorted(set(run_ids))).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Merged:
    """What was written: the pooled table, how many runs and calls it covers, and what a reader should know."""

    per_layer: pd.DataFrame
    runs: int
    calls: int
    notes: list[str]


def merge_runs(
    runs: Sequence[RunFolder], out: str | Path, command: str = "", on_runs: Callable[[int], None] | None = None
) -> Merged:
    """Stack different runs and add them up into a folder.

    Raises:
        ValueError: the runs measured different things (the message names the field), or a table is damaged.
    """
    check_compatible(runs)
    out = Path(out)
    pool, headlines = Pool(), []
    with ExitStack() as stack:
        temporary = stack.enter_context(schema.replacing(out / PER_RUN))
        writer: pq.ParquetWriter | None = None
        for frame in many.stream(runs, on_runs):
            table = pa.Table.from_pandas(frame, preserve_index=False)
            if writer is None:
                writer = stack.enter_context(pq.ParquetWriter(temporary, table.schema))
            writer.write_table(table)
            pool.add(frame)
            headlines.append(_headlines(frame))
    world = str(runs[0].info.get("world", ""))
    per_layer = pool.per_layer(world)
    info = _provenance(runs, per_layer, command)
    schema.write_per_layer(per_layer, out / schema.PER_LAYER)
    _write_runs(pd.concat(headlines, ignore_index=True), runs, out / RUNS)
    schema.write_run(info, out / schema.RUN)
    return Merged(per_layer, info["merged"]["runs"], info["calls"], _notes(runs, pool))


def _headlines(frame: pd.DataFrame) -> pd.DataFrame:
    """summary.headline of each run, with its calls, for thousands of runs: runs in the order of the frame."""
    key = ["run_id", "variant", "reference", "tokens"]
    finite = frame["rel_mse"].where(np.isfinite(frame["rel_mse"]))
    grouped = frame.assign(rel_mse=finite).groupby(key, sort=False)
    table = grouped.agg(
        layers=("layer", "size"),
        calls=("calls", "max"),
        mean_rel_mse=("rel_mse", "mean"),
        pooled_rel_mse=("sum_ee", "sum"),
        median_rel_mse=("rel_mse", "median"),
        mean_cosine=("error_output_cosine", "mean"),
        min_cosine=("error_output_cosine", "min"),
        max_cosine=("error_output_cosine", "max"),
        mean_shrinkage=("shrinkage", "mean"),
        mean_effective_rel_mse=("effective_rel_mse", "mean"),
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        table["pooled_rel_mse"] = table["pooled_rel_mse"] / grouped["sum_yy"].sum()
    order = {run_id: number for number, run_id in enumerate(frame["run_id"].unique())}
    table = table.reset_index().sort_values(key[1:], kind="stable")
    return table.sort_values("run_id", key=lambda ids: ids.map(order), kind="stable")


def _write_runs(table: pd.DataFrame, runs: Sequence[RunFolder], path: Path) -> None:
    """runs.csv: the headline of each run with its folder, seed and device."""
    first = {run.run_id: run for run in reversed(runs)}
    table.insert(1, "folder", [first[run_id].name for run_id in table["run_id"]])
    for name in _RUN_FIELDS:
        table[name] = [first[run_id].info.get(name) for run_id in table["run_id"]]
    with schema.replacing(path) as temporary:
        table.to_csv(temporary, index=False, lineterminator="\n")


def _provenance(runs: Sequence[RunFolder], per_layer: pd.DataFrame, command: str) -> dict[str, Any]:
    """run.json of the pool: what all runs have in common."""
    first = runs[0].info
    common = {
        name: value
        for name, value in first.items()
        if name not in _OF_ONE_RUN and all(run.info.get(name) == value for run in runs)
    }
    variants: dict[str, Any] = {}
    for run in runs:
        variants |= dict(run.info.get("variants") or {})
    silent = {name for run in runs for name in run.info.get("layers_silent") or ()} - set(per_layer["layer"])
    scenes = dict.fromkeys(scene for run in runs for scene in run.info.get("scenes") or ())
    return common | {
        "schema_version": schema.SCHEMA_VERSION,
        "run_id": str(per_layer["run_id"].iloc[0]),
        "world": str(first.get("world", "")),
        "scenes": list(scenes),
        "variants": variants,
        "complete": all(bool(run.info.get("complete", True)) for run in runs),
        "layers_measured": int(per_layer["layer"].nunique()),
        "layers_silent": sorted(silent),
        "calls": int(per_layer["calls"].max()),
        "rows": int(per_layer["rows"].sum()),
        "nonfinite_rows": int(per_layer["nonfinite_rows"].sum()),
        "command": command,
        "merged": {"as": "runs", "runs": len({run.run_id for run in runs}), "intervals": "over runs", "table": RUNS},
    }


def _notes(runs: Sequence[RunFolder], pool: Pool) -> list[str]:
    """What differs between the runs without making them incompatible."""
    notes = []
    for name in ("engine", "device"):
        found = sorted({str(run.info.get(name)) for run in runs})
        if len(found) > 1:
            notes.append(f"{name} differs: {', '.join(found[:4])}{', ...' if len(found) > 4 else ''}")
    if partial := [run for run in runs if run.info.get("complete") is False]:
        notes.append(f"{len(partial)} run(s) are marked incomplete, e.g. {partial[0].path}")
    clusters = pool.clusters()
    few = clusters.counts < len(clusters.present)
    if few.any():
        key = clusters.keys.loc[few].iloc[0]
        notes.append(
            f"{int(few.sum())} layer(s) and kernel(s) are not in every run, e.g. {key['layer']}, {key['variant']}: "
            f"in {clusters.counts[few][0]} of {len(clusters.present)}"
        )
    if len(clusters.present) < resample.FEWEST:
        notes.append(f"fewer than {resample.FEWEST} runs: no intervals in {schema.PER_LAYER}")
    return notes
