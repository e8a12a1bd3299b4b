"""Is this a table, or a run's folder, that others can rely on? Every complaint names file, line, column and values.

    for checked in validate("runs/tiny"):          # one entry a file
        print(checked.file, checked.problems, checked.notes)

A CSV is read as `foreign.read_table` reads it: what a spreadsheet did and can be undone is a note, not a problem.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from analysis.results import checks, codes, foreign, provenance, schema, sources, studies, summary, tables
from analysis.results.cells import Problem

_INTERVALS = [c.name for c in schema.INTERVALS]
_STUDIES = {table.file: table for table in studies.TABLES}
_AGAIN = 1e-6  # intervals drawn again from the calls, whose last digits depend on the machine's BLAS


@dataclass
class Checked:
    """One file: what it was taken for, what is wrong and what is worth knowing. `frame` is None where unreadable."""

    file: str
    kind: str
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    frame: pd.DataFrame | None = None
    places: Sequence[str] = ()  # of the frame's rows, for messages

    def complain(self, found: str, expected: str, column: str = "", place: str = "") -> None:
        self.problems.append(Problem(self.file, place, column, found, expected))


def validate(path: str | Path) -> list[Checked]:
    """Check a per_layer.csv, a Parquet table, a run.json, a run's folder, or a folder of runs."""
    path = Path(path)
    if path.is_dir():
        folders = sources.run_folders(path)
        if not folders:
            nothing = Checked(str(path), "folder")
            nothing.complain("no run in it", f"a run's folder with {schema.PER_LAYER}, or a table")
            return [nothing]
        return [checked for folder in folders for checked in _folder(folder)]
    if path.name in _STUDIES:
        return [_study(path)]
    if path.suffix == ".parquet":
        return [_parquet(path)]
    return [_run(path)[0] if path.suffix == ".json" else _csv(path)]


def _csv(path: Path) -> Checked:
    checked = Checked(str(path), schema.PER_LAYER)
    try:
        reading = foreign.read_table(path)
    except (OSError, ValueError) as error:
        return _unreadable(checked, error)
    checked.notes += reading.notes
    checked.problems += reading.problems
    for name in reading.absent:
        checked.complain("no such column", "every column of data/README.md", name)
    places = np.array([f"line {line}" for line in reading.lines], dtype=object)
    checked.frame, checked.places = reading.frame, places.tolist()
    if not reading.absent:
        damaged = np.isin(places, [problem.place for problem in reading.problems])
        sound = reading.frame[~damaged].reset_index(drop=True)
        checked.problems += checks.check_rows(sound, str(path), places[~damaged].tolist())
    without = int(reading.frame[schema.SUM_NAMES].isna().all(axis=1).sum())
    if without:
        checked.notes.append(f"{without} row(s) without sums: their metrics cannot be derived again")
    return checked


def _parquet(path: Path) -> Checked:
    checked = Checked(str(path), schema.PER_CALL)
    try:
        if "call" not in pq.read_schema(path).names:
            checked.kind = sources.PER_RUN
            frame = schema.conform(pd.read_parquet(path), schema.PER_LAYER_COLUMNS, str(path))
        else:
            frame = schema.read_per_call(path, unique=False)
    except (OSError, ValueError) as error:
        return _unreadable(checked, error)
    checked.frame, checked.places = frame, _Rows()
    checked.problems += checks.check_rows(frame, str(path), checked.places)
    if checked.kind == schema.PER_CALL:
        _constant(checked, frame, ["run_id", "call"], ["scene", "clip", "step"])
    _constant(checked, frame, ["layer"], schema.LABEL_NAMES)
    return checked


class _Rows(list[str]):
    """'row 0', 'row 1', ... without making them all."""

    def __getitem__(self, at: Any) -> Any:
        return f"row {at}"


def _constant(checked: Checked, frame: pd.DataFrame, key: list[str], names: list[str]) -> None:
    """What belongs to a call or a layer is the same in all of its rows."""
    first = frame.groupby(key, sort=False, dropna=False)[names].transform("first")
    told = checks.Complaints(frame, checked.file, _Rows())
    for name in names:
        value = first[name]
        differs = (frame[name] != value).fillna(False) | (frame[name].isna() != value.isna())
        wanted = "{!r} as in the first row of this " + key[-1]
        told.add(differs, name, checks.f_at(wanted, value))
    checked.problems += told.problems


def _unreadable(checked: Checked, error: Exception) -> Checked:
    # The readers' messages begin with the file, and say what to do.
    text = str(error).removeprefix(checked.file).lstrip(": ")
    checked.complain(text, "a table that can be read")
    return checked


def _study(path: Path) -> Checked:
    """A study's table, or the counts of codes: its layout."""
    checked = Checked(str(path), path.name)
    try:
        if path.name == studies.CODES.file:
            checked.frame = codes.find(path.parent)
        else:
            checked.frame = tables.read(_STUDIES[path.name], path.parent)
    except (OSError, ValueError) as error:
        return _unreadable(checked, error)
    return checked


def _run(path: Path) -> tuple[Checked, dict[str, Any]]:
    checked = Checked(str(path), schema.RUN)
    try:
        info = schema.read_run(path)
    except (OSError, ValueError) as error:
        return _unreadable(checked, error), {}
    for name in ("run_id", "world"):
        if name not in info:
            checked.complain("nothing", "a value: tables carry it", name)
    if "merged" not in info and "imported" not in info and "run_id" in info:
        again = provenance.run_id(info)
        if again != info["run_id"]:
            checked.complain(repr(info["run_id"]), f"{again!r}, the hash of this provenance: it was edited", "run_id")
    if info.get("complete") is False:
        checked.notes.append("the run is marked incomplete")
    return checked, info


def _folder(folder: Path) -> list[Checked]:
    """Each file of a run by itself, then against the others."""
    run, info = _run(folder / schema.RUN)
    done = [run]
    if info.get("calls") == 0 and not (folder / schema.PER_LAYER).exists():
        run.notes.append("nothing was measured")
        return done
    layers = _csv(folder / schema.PER_LAYER)
    done.append(layers)
    parts = {name: _parquet(folder / name) for name in (schema.PER_CALL, sources.PER_RUN) if (folder / name).is_file()}
    done += parts.values()
    calls = parts.get(schema.PER_CALL)
    if not parts:
        layers.notes.append(f"no {schema.PER_CALL} beside it: its sums cannot be added again")
    done += [_study(folder / name) for name in _STUDIES if (folder / name).is_file()]
    if info and layers.frame is not None:
        _against_run(info, run, layers, calls)
    for name, part in parts.items():
        if not layers.problems and not part.problems and part.frame is not None and layers.frame is not None:
            _against_parts(layers, part.frame, name)
    return done


def _against_run(info: dict[str, Any], run: Checked, layers: Checked, calls: Checked | None) -> None:
    """run.json tells of the tables beside it."""
    frame = layers.frame
    assert frame is not None
    variants = info.get("variants")
    stated: dict[str, Any] = {"run_id": [info.get("run_id")], "world": [info.get("world")]}
    stated["reference"] = [info["reference"]] if "reference" in info else None
    stated["tokens"] = {"both": ["all", "valid"]}.get(info.get("tokens", ""), [info.get("tokens")])
    stated["variant"] = list(variants) if isinstance(variants, dict) else None
    for name, expected in stated.items():
        if expected is None or expected == [None]:
            continue
        for checked in (layers, calls):
            if checked is None or checked.frame is None or name not in checked.frame:
                continue
            other = ~checked.frame[name].isin(expected)
            if other.any():
                at = int(other.to_numpy().argmax())
                wanted = f"{' or '.join(map(repr, expected))}, as {run.file} says"
                checked.complain(repr(checked.frame[name].iloc[at]), wanted, name, checked.places[at])
    silent = sorted(set(info.get("layers_silent") or ()) & set(frame["layer"]))
    if silent:
        run.complain(f"{silent[0]!r}", f"only layers that {layers.file} does not have", "layers_silent")
    counted = calls.frame if calls is not None and calls.frame is not None else None
    if counted is None:
        return
    totals = {
        "calls": counted["call"].nunique(),
        "rows": counted["rows"].sum(),
        "nonfinite_rows": counted["nonfinite_rows"].sum(),
        "layers_measured": counted["layer"].nunique(),
    }
    for name, total in totals.items():
        if name in info and info[name] != int(total):
            run.complain(repr(info[name]), f"{int(total)}, which {schema.PER_CALL} adds up to", name)


def _against_parts(layers: Checked, parts: pd.DataFrame, name: str) -> None:
    """per_layer.csv is what per_call.parquet, or a pool's per_run.parquet, adds up to."""
    frame = layers.frame
    assert frame is not None
    if name == schema.PER_CALL:
        again, compared = summary.summarize(parts, ""), ("calls", *schema.SUM_NAMES, *_INTERVALS)
    else:
        again, compared = _added(parts, frame["run_id"].iloc[0]), ("calls", *schema.SUM_NAMES)
    again = again.set_index(schema.PER_LAYER_KEY)
    have = frame.set_index(schema.PER_LAYER_KEY)
    where = pd.Series(range(len(frame)), index=have.index)
    for key in again.index.difference(have.index)[: checks.SHOWN]:
        layers.complain("no row", f"one for {_name(key)}: {name} has its calls", "layer")
    told = checks.Complaints(frame, layers.file, layers.places)
    told.add(~have.index.isin(again.index), "layer", f"a layer and kernel that {name} has")
    common = have.index.intersection(again.index)
    for column in compared:
        tolerance = _AGAIN if column in _INTERVALS else checks.RELATIVE
        values = again.loc[common, column].to_numpy(np.float64)
        scale = _AGAIN if column in _INTERVALS else 0.0  # an interval's end may lie near 0
        bad = ~checks.close(
            have.loc[common, column].to_numpy(np.float64), values, tolerance, scale * np.abs(values).max()
        )
        expected = pd.Series(np.nan, index=range(len(frame)))
        positions = where[common].to_numpy()
        expected.iloc[positions] = values
        flags = np.zeros(len(frame), dtype=bool)
        flags[positions[bad]] = True
        told.add(flags, column, checks.f_at("{!r}, which " + name + " adds up to", expected))
    layers.problems += told.problems


def _added(runs: pd.DataFrame, run_id: str) -> pd.DataFrame:
    """Sums of a pool's runs, one row a layer and kernel as in its per_layer.csv, under the pool's run id."""
    how = {name: ("max" if name == "max_abs_e" else "sum") for name in ("calls", *schema.SUM_NAMES)}
    keys = [name for name in schema.PER_LAYER_KEY if name != "run_id"]
    return runs.groupby(keys, sort=False, dropna=False).agg(how).reset_index().assign(run_id=run_id)


def _name(key: Any) -> str:
    return ", ".join(f"{name}={value}" for name, value in zip(schema.PER_LAYER_KEY, key, strict=True))
