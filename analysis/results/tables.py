"""How a study's table is described, written, read and checked. The tables themselves stand in `studies`.

A study (ablation, theory, propagation, closed loop) leaves one or more tables in a run's folder, beside the three that
`schema` describes, and one JSON file with its provenance. Every table has `schema_version` and `run_id` first; a file
ending in `.parquet` is Parquet, any other CSV with floats that read back equal. Empty cells are empty, never 0.

    write(studies.ABLATION, frame, "runs/tiny")
    frame = read(studies.ABLATION, "runs/tiny")        # FileNotFoundError names the command that makes it
    frame = find(studies.ABLATION, "runs/tiny")        # None where the folder has none
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.results.schema import Column, conform, replacing

VERSION = Column("schema_version", "Int64", "", "version of this table's layout", "label")
RUN_ID = Column("run_id", "string", "", "first 12 hex digits of the SHA-256 of the study's provenance", "key")
_VOLATILE = ("command", "git_commit", "timing", "run_id", "complete")


@dataclass(frozen=True)
class Table:
    """One table: its file, the version of its layout, its columns (version and run id are added), what a row is."""

    file: str
    version: int
    row: str
    command: str  # makes it
    body: tuple[Column, ...]

    @property
    def columns(self) -> tuple[Column, ...]:
        return (VERSION, RUN_ID, *self.body)

    @property
    def names(self) -> list[str]:
        return [c.name for c in self.columns]

    @property
    def key(self) -> list[str]:
        return [c.name for c in self.columns if c.role == "key"]


def write(table: Table, frame: pd.DataFrame, folder: str | Path, run_id: str) -> pd.DataFrame:
    """Write a study's rows (without version and run id) and return the frame as it reads back.

    Raises ValueError where a column is missing, unknown or mistyped, or where two rows share a key.
    """
    path = Path(folder) / table.file
    frame = conform(frame.assign(schema_version=table.version, run_id=run_id), table.columns, str(path))
    _check_unique(table, frame, path)
    with replacing(path) as temporary:
        if path.suffix == ".parquet":
            frame.to_parquet(temporary, index=False)
        else:
            frame.to_csv(temporary, index=False, lineterminator="\n")
    return frame


def find(table: Table, folder: str | Path) -> pd.DataFrame | None:
    """The table in a folder, None where it has none. Raises ValueError as `read`."""
    return read(table, folder) if (Path(folder) / table.file).is_file() else None


def read(table: Table, folder: str | Path) -> pd.DataFrame:
    """The table in a folder. Raises FileNotFoundError, or ValueError naming the file and what is wrong with it."""
    path = Path(folder) / table.file
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; make it with `{table.command} --out {folder}`")
    try:
        text = pd.read_parquet(path) if path.suffix == ".parquet" else _read_csv(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a table of this toolkit: {error}") from None
    versions = text["schema_version"].unique().tolist() if "schema_version" in text and len(text) else [None]
    if [str(v) for v in versions] != [str(table.version)]:
        raise ValueError(
            f"{path}: version {versions[0]}, this toolkit reads {table.version}; make it again with `{table.command}`"
        )
    if path.suffix != ".parquet":
        text = _numbers(table, text, path)
    frame = conform(text, table.columns, str(path))
    _check_unique(table, frame, path)
    return frame


def _read_csv(path: Path) -> pd.DataFrame:
    return pd.read_csv(path, dtype="string", keep_default_na=False)


def _numbers(table: Table, text: pd.DataFrame, path: Path) -> pd.DataFrame:
    """Text cells to numbers where the layout says so; ValueError names line and column of one that is not."""
    kinds = {c.name: (int if c.dtype == "Int64" else float) for c in table.columns if c.dtype != "string"}
    out: dict[str, Any] = {}
    for name in text.columns:
        cells = text[name]
        if name not in kinds:
            out[name] = cells
            continue
        values: list[Any] = []
        for line, cell in enumerate(cells, start=2):
            try:
                values.append(kinds[name](cell) if cell != "" else None)
            except ValueError:
                raise ValueError(f"{path}: line {line}, column {name!r}: {cell!r} is not a number") from None
        out[name] = pd.Series(values, dtype="Int64" if kinds[name] is int else "float64")
    return pd.DataFrame(out)


def _check_unique(table: Table, frame: pd.DataFrame, path: Path) -> None:
    double = frame.duplicated(table.key)
    if double.any():
        position = int(double.to_numpy().argmax())
        where = ", ".join(f"{k}={frame[k].iloc[position]}" for k in table.key)
        raise ValueError(f"{path}: row {position + 2} repeats the key {where}")


def run_id(info: dict[str, Any]) -> str:
    """First 12 hex digits of the SHA-256 of a study's provenance, without times, commit and command."""
    identity = {key: value for key, value in info.items() if key not in _VOLATILE}
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]


def write_info(name: str, info: dict[str, Any], folder: str | Path) -> str:
    """Write a study's provenance to `name`.json and return its run id."""
    identity = run_id(info)
    with replacing(Path(folder) / f"{name}.json") as temporary:
        temporary.write_text(
            json.dumps({"run_id": identity} | info, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )
    return identity


def read_info(name: str, folder: str | Path) -> dict[str, Any]:
    """A study's provenance; empty where the folder has none. Raises ValueError where it is not JSON."""
    path = Path(folder) / f"{name}.json"
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds {type(found).__name__}, expected an object")
    return found


def markdown(tables: tuple[Table, ...]) -> str:
    """The column dictionary of these tables; data/STUDIES.md is this text for `studies.TABLES`."""
    lines = ["# Columns of the studies' tables", "", "Generated from `analysis/results/studies.py`.", ""]
    for table in tables:
        lines += [f"## {table.file}", "", f"Version {table.version}; {table.row}. Made by `{table.command}`.", ""]
        lines += ["| column | type | unit | role | meaning |", "|---|---|---|---|---|"]
        for c in table.columns:
            meaning = c.meaning.replace("|", "\\|")
            lines.append(f"| `{c.name}` | {c.dtype} | {c.unit} | {c.role} | {meaning} |")
        lines.append("")
    return "\n".join(lines)
