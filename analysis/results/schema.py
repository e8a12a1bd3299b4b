"""The tables that a run leaves, column by column: names, units, meaning, and the only code that reads or writes them.

`per_call.parquet` holds sums, one row per (call, layer, variant); everything else derives from sums by adding.
`per_layer.csv` is the file people share: the same sums over all calls, the metrics that follow, and their intervals.
`run.json` is the provenance. Key of a row: run_id, layer, variant, reference, tokens (and call in per_call).

    frame = read_per_layer("run/per_layer.csv")     # ValueError if it is not one, naming line and column
    write_per_layer(frame, "run/per_layer.csv")     # temporary name, then rename; floats read back equal
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.results import migrate

SCHEMA_VERSION = 1
PER_LAYER, PER_CALL, RUN = "per_layer.csv", "per_call.parquet", "run.json"


@dataclass(frozen=True)
class Column:
    """One column: pandas dtype, unit ('' for none), meaning, and role: key, label, sum, metric or interval."""

    name: str
    dtype: str  # 'string', 'Int64' or 'float64'
    unit: str
    meaning: str
    role: str


def _c(name: str, dtype: str, role: str, meaning: str, unit: str = "") -> Column:
    return Column(name, dtype, unit, meaning, role)


KEYS = (
    _c("run_id", "string", "key", "first 12 hex digits of the SHA-256 of the run's provenance"),
    _c("layer", "string", "key", "module path of the layer, without wrappers"),
    _c("variant", "string", "key", "quantiser: shipped, fixed or another registered name"),
    _c("reference", "string", "key", "what y is: bf16, as_run or fp64"),
    _c("tokens", "string", "key", "all, or valid: without the padding that the model appends"),
)
CALL_KEYS = (
    _c("call", "Int64", "key", "index of the model's forward pass, from 0"),
    _c("scene", "string", "label", "scene of the call, empty where the script has none"),
    _c("clip", "Int64", "label", "clip of the rollout, from 0"),
    _c("step", "Int64", "label", "denoising step within the clip, from 0"),
)
LABELS = (
    _c("block", "Int64", "label", "transformer block, from 0; -1 unknown"),
    _c("attention", "string", "label", "self or cross"),
    _c("projection", "string", "label", "q, k, v or o"),
    _c("in_features", "Int64", "label", "K"),
    _c("out_features", "Int64", "label", "N"),
)
SUMS = (
    _c("rows", "Int64", "sum", "measured rows (tokens)", "rows"),
    _c("nonfinite_rows", "Int64", "sum", "rows with NaN or Inf, left out of every other sum", "rows"),
    _c("zero_rows", "Int64", "sum", "measured rows that are all zero", "rows"),
    _c("sum_yy", "float64", "sum", "sum of y^2, y = reference output"),
    _c("sum_ee", "float64", "sum", "sum of e^2, e = quantised output - y"),
    _c("sum_ey", "float64", "sum", "sum of e*y"),
    _c("sum_zz", "float64", "sum", "sum of z^2, z = y without the bias"),
    _c("sum_ez", "float64", "sum", "sum of e*z"),
    _c("sum_eff_yy", "float64", "sum", "sum of y^2 after the norm behind q or k (no norm: sum_yy)"),
    _c("sum_eff_ee", "float64", "sum", "sum of e^2 after that norm (no norm: sum_ee)"),
    _c("max_abs_e", "float64", "sum", "largest |e|; merges by maximum"),
    _c("sum_magnitude_error", "float64", "sum", "sum of |code| - |s| over activation codes", "LSB"),
    _c("sum_square_error", "float64", "sum", "sum of (code - s)^2", "LSB^2"),
    _c("mismatched", "Int64", "sum", "codes that differ from half-even, exact ties excepted", "codes"),
    _c("zeroed", "Int64", "sum", "codes 0 where x is not 0", "codes"),
    _c("saturated", "Int64", "sum", "codes with |code| = 127", "codes"),
    _c("sum_crest", "float64", "sum", "sum over nonzero rows of absmax / rms"),
)
METRICS = (
    _c("rel_mse", "float64", "metric", "sum_ee / sum_yy"),
    _c("error_output_cosine", "float64", "metric", "sum_ey / sqrt(sum_ee * sum_yy); strongly negative = shrinkage"),
    _c("shrinkage", "float64", "metric", "-sum_ey / sum_yy: fraction of its magnitude that the output loses"),
    _c("residual_rel_mse", "float64", "metric", "rel_mse * (1 - cosine^2): what one output gain could not repair"),
    _c("rel_mse_nobias", "float64", "metric", "sum_ee / sum_zz"),
    _c("error_output_cosine_nobias", "float64", "metric", "sum_ez / sqrt(sum_ee * sum_zz)"),
    _c("effective_rel_mse", "float64", "metric", "rel_mse after the norm behind q or k; v and o: rel_mse"),
    _c("sqnr_db", "float64", "metric", "-10 log10 rel_mse", "dB"),
    _c("magnitude_bias_lsb", "float64", "metric", "mean of |code| - |s|; truncation -0.5, rounding 0", "LSB"),
    _c("rmse_lsb", "float64", "metric", "rms of code - s; truncation 0.577, rounding 0.289", "LSB"),
    _c("code_mismatch", "float64", "metric", "fraction of codes that differ from half-even, ties excepted"),
    _c("zeroed_fraction", "float64", "metric", "fraction of codes 0 where x is not 0"),
    _c("saturated_fraction", "float64", "metric", "fraction of codes with |code| = 127"),
    _c("crest", "float64", "metric", "mean over nonzero rows of absmax / rms"),
)
INTERVAL_OF = ("rel_mse", "error_output_cosine", "shrinkage", "effective_rel_mse")
INTERVALS = tuple(
    _c(f"{metric}_{end}", "float64", "interval", f"{word} end of the 95 % bootstrap interval of {metric} over calls")
    for metric in INTERVAL_OF
    for end, word in (("lo", "lower"), ("hi", "upper"))
)
VERSION = _c("schema_version", "Int64", "label", "version of this table's layout")
WORLD = _c("world", "string", "label", "what was measured: a world's name, or the script that was run")
CALLS = _c("calls", "Int64", "sum", "forward passes that the sums cover", "calls")

PER_CALL_COLUMNS = (VERSION, *KEYS, *CALL_KEYS, *LABELS, *SUMS)
PER_LAYER_COLUMNS = (VERSION, WORLD, *KEYS, *LABELS, CALLS, *SUMS, *METRICS, *INTERVALS)
PER_LAYER_KEY = [c.name for c in KEYS]
PER_CALL_KEY = [*PER_LAYER_KEY, "call"]
SUM_NAMES = [c.name for c in SUMS]
LABEL_NAMES = [c.name for c in LABELS]


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A temporary path beside `path`, renamed to it when the block ends well and deleted when it does not."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=path.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def conform(frame: pd.DataFrame, columns: tuple[Column, ...], what: str) -> pd.DataFrame:
    """`frame` with exactly these columns, in order and typed. ValueError names what is missing, extra or mistyped."""
    names = [c.name for c in columns]
    if missing := [n for n in names if n not in frame.columns]:
        raise ValueError(f"{what}: missing column(s) {', '.join(missing)}; see data/README.md for the layout")
    if extra := [n for n in frame.columns if n not in names]:
        raise ValueError(f"{what}: unknown column(s) {', '.join(map(str, extra))}; see data/README.md for the layout")
    out = {}
    for column in columns:
        try:
            out[column.name] = frame[column.name].astype(column.dtype)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{what}: column {column.name!r} is not {column.dtype}: {error}") from None
    return pd.DataFrame(out)


def write_per_layer(frame: pd.DataFrame, path: str | Path) -> None:
    """Write per_layer.csv. Floats with repr precision (they read back equal), empty cells empty, infinities 'inf'."""
    frame = conform(frame, PER_LAYER_COLUMNS, str(path))
    with replacing(path) as temporary:
        frame.to_csv(temporary, index=False, lineterminator="\n")


def read_per_layer(path: str | Path) -> pd.DataFrame:
    """Read per_layer.csv. Raises FileNotFoundError, or ValueError naming the file, line and column at fault."""
    path = Path(path)
    text = _read_text(path)
    text = migrate.upgrade("per_layer", text, one_version(text["schema_version"], path), SCHEMA_VERSION, str(path))
    numeric = {c.name: c for c in PER_LAYER_COLUMNS if c.dtype != "string"}
    columns: dict[str, Any] = {}
    for name in text.columns:
        cells = text[name]
        columns[name] = _parse_numbers(cells, numeric[name], path) if name in numeric else cells
    frame = conform(pd.DataFrame(columns), PER_LAYER_COLUMNS, str(path))
    _check_unique(frame, PER_LAYER_KEY, path)
    return frame


def _parse_numbers(cells: pd.Series, column: Column, path: Path) -> pd.Series:
    kind = int if column.dtype == "Int64" else float
    values: list[Any] = []
    for line, cell in enumerate(cells, start=2):
        try:
            values.append(kind(cell) if cell != "" else None)
        except ValueError:
            raise ValueError(f"{path}: line {line}, column {column.name!r}: {cell!r} is not a number") from None
    return pd.Series(values, dtype=column.dtype)


def write_per_call(frame: pd.DataFrame, path: str | Path) -> None:
    """Write per_call.parquet."""
    frame = conform(frame, PER_CALL_COLUMNS, str(path))
    with replacing(path) as temporary:
        frame.to_parquet(temporary, index=False)


def read_per_call(path: str | Path, unique: bool = True) -> pd.DataFrame:
    """Read per_call.parquet. Raises FileNotFoundError or ValueError naming the file and column at fault.

    `unique=False` leaves rows that repeat a key to the caller.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; a run's folder holds {PER_CALL}")
    try:
        frame = pd.read_parquet(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a Parquet file: {error}") from None
    version = one_version(frame["schema_version"], path, "row") if "schema_version" in frame and len(frame) else None
    frame = migrate.upgrade("per_call", frame, version, SCHEMA_VERSION, str(path))
    frame = conform(frame, PER_CALL_COLUMNS, str(path))
    if unique:
        _check_unique(frame, PER_CALL_KEY, path)
    return frame


def write_run(run: dict[str, Any], path: str | Path) -> None:
    """Write run.json."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(run, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_run(path: str | Path) -> dict[str, Any]:
    """Read run.json. Raises FileNotFoundError or ValueError."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; a run's folder holds {RUN}")
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    version = run.get("schema_version") if isinstance(run, dict) else None
    return migrate.upgrade("run", run, version, SCHEMA_VERSION, str(path))


def _read_text(path: Path) -> pd.DataFrame:
    """A per_layer.csv with its cells as text. Raises FileNotFoundError or ValueError."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; a run's folder holds {PER_LAYER}")
    try:
        text = pd.read_csv(path, dtype="string", keep_default_na=False, encoding="utf-8")
    except ValueError as error:  # pandas' own and what the decoder raises
        empty = isinstance(error, pd.errors.EmptyDataError)
        text = pd.DataFrame()
        if not empty:
            raise ValueError(f"{path} is not a CSV of this toolkit: {error}; see `shrinkage validate {path}`") from None
    if "schema_version" not in text or text.empty:
        raise ValueError(f"{path}: no column 'schema_version' or no rows; is this a {PER_LAYER} of this toolkit?")
    return text


def one_version(versions: pd.Series, path: str | Path, place: str = "line") -> Any:
    """The schema version that every row states. ValueError names the first row that states another."""
    first = versions.iloc[0]
    other = (versions != first).fillna(True).to_numpy()
    if other.any():
        position = int(other.argmax())
        found = versions.iloc[position]
        number = position + 2 if place == "line" else position
        raise ValueError(
            f"{path}: mixed schema versions: {place} {number} has {found}, the first row {first}; "
            "keep one version in a file"
        )
    return first


def _check_unique(frame: pd.DataFrame, key: list[str], path: Path) -> None:
    double = frame.duplicated(key)
    if double.any():
        position = int(double.to_numpy().argmax())
        where = ", ".join(f"{k}={frame[k].iloc[position]}" for k in key)
        raise ValueError(f"{path}: line {position + 2} repeats the key {where}")


def markdown() -> str:
    """The column dictionary as Markdown; data/README.md is this text."""
    lines = [
        "# Columns of a run's tables",
        "",
        f"Generated from `analysis/results/schema.py`, schema version {SCHEMA_VERSION}. Empty cells are never 0.",
        "",
    ]
    for title, columns in (("per_layer.csv", PER_LAYER_COLUMNS), ("per_call.parquet", PER_CALL_COLUMNS)):
        lines += [f"## {title}", "", "| column | type | unit | role | meaning |", "|---|---|---|---|---|"]
        for c in columns:
            meaning = c.meaning.replace("|", "\\|")
            lines.append(f"| `{c.name}` | {c.dtype} | {c.unit} | {c.role} | {meaning} |")
        lines.append("")
    lines += [
        "## What `shrinkage merge` leaves for several runs",
        "",
        "`per_layer.csv` as above, summed over the runs, its intervals over runs instead of calls;",
        "`per_run.parquet`, the same columns with one row a run, layer and kernel;",
        "`runs.csv`, the headline of each run and kernel.",
        "",
    ]
    return "\n".join(lines)
