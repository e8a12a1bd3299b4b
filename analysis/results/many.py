"""Many runs: their Parquet files read through DuckDB, a few runs at a time, so that memory does not grow with them.

    runs = find_runs(["cluster/rollouts"])
    for frame in stream(runs): ...                  # one row a run, layer and kernel, in order of the runs

Sums are taken run by run, in order of its rows and by one thread, so that a merge can be repeated bit for bit.
Intervals of a run's rows are those of its own per_layer.csv, empty where it has none. `pool` adds the runs up.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from analysis.results import checks, parts, schema, summary
from analysis.results.sources import RunFolder

BATCH = 16  # runs a query
_MOST_WORKERS = 8  # shared storage, not the processor, is what more of them would wait for
_TYPES = {"string": "VARCHAR", "Int64": "BIGINT", "float64": "DOUBLE"}
_KEY = schema.PER_LAYER_KEY
_ORDER = ["reference", "tokens", "block", "attention", "projection", "layer", "variant"]
_INTERVALS = [c.name for c in schema.INTERVALS]
_HEADER = ",".join(c.name for c in schema.PER_LAYER_COLUMNS)
_local = threading.local()


def duckdb() -> Any:
    """The module. ValueError says how to get it where it is not installed."""
    try:
        import duckdb as module
    except ImportError:
        raise ValueError("many runs need DuckDB, which is not installed: pip install 'int8-shrinkage[many]'") from None
    return module


def stream(
    runs: Sequence[RunFolder], on_runs: Callable[[int], None] | None = None, workers: int | None = None
) -> Iterator[pd.DataFrame]:
    """per_layer rows of every run, in order of the runs, a batch at a time. Folders with one run id are one run.

    Args:
        on_runs: called with the number of folders just read.
        workers: threads; one a core by default, at most 8.

    Raises:
        ValueError: a table is damaged, of another run than its run.json, or at odds with the per_layer.csv beside it.
    """
    duckdb()
    jobs = iter(_jobs(runs))
    count = workers or min(_MOST_WORKERS, os.cpu_count() or 1)
    with ThreadPoolExecutor(count) as pool:
        while wave := list(islice(jobs, count)):
            for job, frame in zip(wave, pool.map(_rows, wave), strict=True):
                yield frame
                if on_runs is not None:
                    on_runs(len(job))


def _jobs(runs: Sequence[RunFolder]) -> list[list[RunFolder]]:
    """Batches of runs with one folder each; the folders of a run with several stand alone."""
    by_run: dict[str, list[RunFolder]] = {}
    for run in runs:
        by_run.setdefault(run.run_id, []).append(run)
    jobs: list[list[RunFolder]] = []
    open_batch: list[RunFolder] = []
    for folders in by_run.values():
        if len(folders) > 1 or not _is_plain(folders[0]):
            jobs += [open_batch] if open_batch else []
            jobs.append(folders)
            open_batch = []
        else:
            open_batch.append(folders[0])
            if len(open_batch) == BATCH:
                jobs.append(open_batch)
                open_batch = []
    return jobs + ([open_batch] if open_batch else [])


def _is_plain(run: RunFolder) -> bool:
    """The table has the present columns and version and can be read as it is; others go through their migration."""
    try:
        with pq.ParquetFile(run.per_call) as file:
            names, groups = file.schema_arrow.names, file.metadata
    except (OSError, ValueError) as error:
        raise ValueError(f"{run.per_call} is not a Parquet file: {error}") from None
    if names != [c.name for c in schema.PER_CALL_COLUMNS]:
        return False
    versions = [groups.row_group(number).column(0).statistics for number in range(groups.num_row_groups)]
    return all(v is not None and v.has_min_max and v.min == v.max == schema.SCHEMA_VERSION for v in versions)


def _rows(job: list[RunFolder]) -> pd.DataFrame:
    if len({run.run_id for run in job}) == 1 and (len(job) > 1 or not _is_plain(job[0])):
        per_call, _ = parts.join(job)
        return summary.summarize(per_call, str(job[0].info.get("world", "")))
    return _query(job)


def _query(runs: list[RunFolder]) -> pd.DataFrame:
    """Rows of a batch, by one thread of DuckDB."""
    if not hasattr(_local, "connection"):
        _local.connection = duckdb().connect()
        # One thread a connection: sums of floats are then taken in the order of the rows, whatever the machine.
        _local.connection.execute("SET threads = 1; SET memory_limit = '700MB'; SET temp_directory = ''")
    tables = [run.path / schema.PER_LAYER for run in runs if (run.path / schema.PER_LAYER).is_file()]
    for table in tables:
        _check_header(table)
    given: dict[str, Any] = {"calls": [_literal(run.per_call) for run in runs]}
    if tables:
        given["tables"] = [_literal(table) for table in tables]
    try:
        frame = _local.connection.execute(_sql(bool(tables)), given).df()
    except duckdb().Error as error:
        which = f"{runs[0].path} ... {runs[-1].path}" if len(runs) > 1 else str(runs[0].path)
        raise ValueError(f"cannot add up {which}: {error}; see `shrinkage validate`") from None
    position = {run.run_id: number for number, run in enumerate(runs)}
    _check(frame, runs, position)
    frame = frame.assign(_run=frame["run_id"].map(position)).sort_values(["_run", *_ORDER], kind="stable")
    worlds = {run.run_id: str(run.info.get("world", "")) for run in runs}
    frame = frame.assign(schema_version=schema.SCHEMA_VERSION, world=frame["run_id"].map(worlds))
    frame = frame.assign(**summary.metrics(frame))
    names = [c.name for c in schema.PER_LAYER_COLUMNS]
    return schema.conform(frame[names].reset_index(drop=True), schema.PER_LAYER_COLUMNS, "runs")


def _literal(path: Path) -> str:
    """A path in which DuckDB sees no pattern."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in str(path))


def _check_header(table: Path) -> None:
    with table.open(encoding="utf-8", errors="replace", newline="") as file:
        if file.readline().rstrip("\n") != _HEADER:
            raise ValueError(f"{table} is not as this toolkit writes it; see `shrinkage validate {table}`")


def _sql(with_tables: bool) -> str:
    keys, labels = ", ".join(_KEY), ", ".join(schema.LABEL_NAMES)
    added = [
        f"{'max' if c.name == 'max_abs_e' else 'sum'}({c.name})::{_TYPES[c.dtype]} AS {c.name}" for c in schema.SUMS
    ]
    filled = " + ".join(schema.SUM_NAMES)
    inner = (
        f"SELECT {keys}, {labels}, count(DISTINCT call) AS calls, count(*) AS lines, count({filled}) AS filled, "
        f"min(schema_version) AS oldest, max(schema_version) AS newest, {', '.join(added)} "
        f"FROM read_parquet($calls) GROUP BY {keys}, {labels}"
    )
    if not with_tables:
        empty = ", ".join(f"NULL::DOUBLE AS {name}" for name in _INTERVALS)
        return f"SELECT *, NULL::BIGINT AS stated_calls, NULL::DOUBLE AS stated_sum_ee, {empty} FROM ({inner})"
    columns = ", ".join(f"'{c.name}': '{_TYPES[c.dtype]}'" for c in schema.PER_LAYER_COLUMNS)
    return (
        f"SELECT s.*, t.calls AS stated_calls, t.sum_ee AS stated_sum_ee, {', '.join('t.' + n for n in _INTERVALS)} "
        f"FROM ({inner}) s LEFT JOIN read_csv($tables, header = true, auto_detect = false, delim = ',', quote = '\"', "
        f"escape = '\"', nullstr = '', columns = {{{columns}}}) t USING ({keys})"
    )


def _check(frame: pd.DataFrame, runs: list[RunFolder], position: dict[str, int]) -> None:
    """What cannot be added is refused, and the first row at fault is named."""
    found = set(frame["run_id"].unique())
    if missing := [run for run in runs if run.run_id not in found]:
        raise ValueError(f"{missing[0].per_call} has no row of run {missing[0].run_id!r}, which its run.json names")
    stated = frame["stated_calls"].notna()
    same_sum = checks.close(
        frame["stated_sum_ee"].to_numpy(np.float64), frame["sum_ee"].to_numpy(np.float64), checks.RELATIVE
    )
    version = (frame["oldest"] != schema.SCHEMA_VERSION) | (frame["newest"] != schema.SCHEMA_VERSION)
    wrong = {
        "belongs to a run that no run.json here names": ~frame["run_id"].isin(position),
        f"has rows of a schema version other than {schema.SCHEMA_VERSION}": version,
        "repeats a call": frame["lines"] != frame["calls"],
        "has calls with empty sums": frame["filled"] != frame["lines"],
        "appears with two shapes or places": frame.duplicated(_KEY, keep=False),
        f"is not what {schema.PER_LAYER} says": stated & (~same_sum | (frame["stated_calls"] != frame["calls"])),
    }
    for what, bad in wrong.items():
        if bad.any():
            row = frame[bad].iloc[0]
            run = runs[position[row["run_id"]]] if row["run_id"] in position else runs[0]
            raise ValueError(
                f"{run.per_call}: layer {row['layer']!r}, {row['variant']} (run {row['run_id']}) {what}; "
                f"see `shrinkage validate {run.path}`"
            )
