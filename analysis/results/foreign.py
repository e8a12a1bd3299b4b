"""Tables that come from elsewhere: a per_layer.csv that a spreadsheet saved again, and foreign CSV imported.

`read_table` reads our own table after a spreadsheet had it (`schema.read_per_layer` stays strict): what was changed and
could be undone stands in `notes`, what could not in `problems`. `import_table` makes a table of ours from anybody's
columns, as far as it goes; what a foreign file does not hold stays empty.

    reading = read_table("theirs/per_layer.csv")
    made = import_table("theirs.csv", {"layer": "Layer name", "rel_mse": "MSE"}, {"variant": "shipped"})
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis import sites
from analysis.results import checks, migrate, numbers, schema, summary
from analysis.results.cells import Cells, Problem, read_cells

_KINDS = {c.name: c.dtype for c in schema.PER_LAYER_COLUMNS}
MEASURED = [c.name for c in (*schema.SUMS, *schema.METRICS)]
_DEFAULTS = {"reference": "bf16", "tokens": "all"}
_OWN = ("schema_version", "run_id")


@dataclass
class Reading:
    """A per_layer table as it was read. `frame` has every column of the schema; `absent` ones are empty."""

    frame: pd.DataFrame
    lines: list[int]
    notes: list[str]
    problems: list[Problem]
    absent: list[str]


@dataclass
class Imported:
    """A foreign table in our columns, its provenance, and what a reader should know about it."""

    frame: pd.DataFrame
    info: dict[str, Any]
    notes: list[str]


def read_table(path: str | Path) -> Reading:
    """A per_layer.csv, also one that a spreadsheet saved.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it cannot be read as one table of a schema version that this toolkit reads.
    """
    cells = read_cells(path, _KINDS)
    text = pd.DataFrame(
        {_known(name): cells.column(name) for name in cells.header}, dtype="string", index=range(len(cells.rows))
    )
    if len(set(map(_known, cells.header))) < len(cells.header):
        raise ValueError(f"{path}: two columns differ in case only; rename one")
    if "schema_version" in text:
        version = schema.one_version(text["schema_version"], path)
        text = migrate.upgrade("per_layer", text, version, schema.SCHEMA_VERSION, str(path))
        if version != str(schema.SCHEMA_VERSION):
            cells.notes.append(f"schema version {version}, read as {schema.SCHEMA_VERSION}")
    if extra := [name for name in text.columns if name not in _KINDS]:
        cells.notes.append(f"column(s) ignored: {', '.join(extra)}")
    present = [name for name in _KINDS if name in text.columns]
    if not {"layer", *MEASURED} & set(present):
        raise ValueError(
            f"{path}: no column of a per_layer table; it has {', '.join(cells.header)}. "
            f"Turn it into one with: shrinkage import {path} --map layer=NAME,rel_mse=NAME --out FOLDER"
        )
    if [name for name in text.columns if name in _KINDS] != present:
        cells.notes.append("columns in another order")
    frame, problems = _typed({name: text[name].tolist() for name in present}, cells)
    return Reading(frame, cells.lines, cells.notes, problems, [name for name in _KINDS if name not in present])


def _known(name: str) -> str:
    """A column of the schema written in other case -> its name; any other name unchanged."""
    return name.lower() if name.lower() in _KINDS else name


def _typed(columns: Mapping[str, list[str]], cells: Cells) -> tuple[pd.DataFrame, list[Problem]]:
    """Text columns -> a frame of the schema's columns and types, absent ones empty."""
    numeric = {name: column for name, column in columns.items() if _KINDS[name] != "string"}
    values, problems = numbers.parse(numeric, _KINDS, cells.file, cells.lines, cells.separator, cells.notes)
    blank = [""] * len(cells.rows)
    made = {
        name: pd.Series(columns.get(name, blank), dtype="string")
        if kind == "string"
        else pd.Series(values.get(name, [None] * len(blank)), dtype=kind)
        for name, kind in _KINDS.items()
    }
    return pd.DataFrame(made), problems


def import_table(
    path: str | Path,
    mapping: Mapping[str, str] | None = None,
    constants: Mapping[str, str] | None = None,
    layer_regex: str | None = None,
    layer_name: str | None = None,
    separator: str | None = None,
) -> Imported:
    """A foreign CSV as a per_layer table.

    Args:
        mapping: their column by our column. A column that already has our name needs no entry.
        constants: the value of a whole column, by our column ('variant': 'shipped').
        layer_regex: pattern of their layer names; its named groups block, attention, projection label a layer.
        layer_name: what a matched name becomes, with groups as in `re.sub` ('blocks.\\1.self_attn.\\2').
        separator: theirs, where it cannot be told.

    Raises:
        FileNotFoundError, ValueError: naming the file, line and column, or the entry of `mapping` at fault.
    """
    cells = read_cells(path, (mapping or {}).values(), separator)
    chosen = _choose(cells, dict(mapping or {}), dict(constants or {}))
    notes = cells.notes
    columns = {ours: cells.column(theirs) for ours, theirs in chosen.items()}
    for ours, value in (constants or {}).items():
        columns[ours] = [value] * len(cells.rows)
    for ours, value in _DEFAULTS.items():
        if ours not in columns:
            columns[ours] = [value] * len(cells.rows)
            notes.append(f"{ours} is taken to be {value!r}; say so if not: --set {ours}=...")
    columns.setdefault("world", [f"{Path(path).stem} (imported)"] * len(cells.rows))
    if unused := [name for name in cells.header if name not in chosen.values()]:
        notes.append(f"their column(s) not used: {', '.join(unused)}")
    columns["layer"] = _rename(columns["layer"], layer_regex, layer_name, cells)
    frame, problems = _typed(columns, cells)
    if problems:
        raise ValueError(str(problems[0]))
    frame = _label(frame, layer_regex if layer_name is None else None)
    source = {
        "file": Path(path).name,
        "sha256": hashlib.sha256(Path(path).read_bytes()).hexdigest(),
        "map": chosen,
        "set": dict(constants or {}),
        "layer_regex": layer_regex,
        "layer_name": layer_name,
    }
    identity = hashlib.sha256(json.dumps(source, sort_keys=True).encode()).hexdigest()[:12]
    frame["schema_version"], frame["run_id"] = schema.SCHEMA_VERSION, identity
    notes += derive(frame)
    frame = schema.conform(frame, schema.PER_LAYER_COLUMNS, str(path))
    _check_keys(frame, cells)
    if wrong := checks.check_rows(frame, cells.file, [f"line {line}" for line in cells.lines]):
        raise ValueError(
            f"{wrong[0]}; is {chosen.get(wrong[0].column, wrong[0].column)!r} the right column, in the right unit?"
        )
    info = {"schema_version": schema.SCHEMA_VERSION, "run_id": identity, "world": frame["world"].iloc[0]}
    return Imported(frame, info | {"imported": source}, notes)


def assignments(given: Iterable[str], option: str) -> dict[str, str]:
    """['a=b,c=d', 'e=f, g'] -> {'a': 'b', 'c': 'd', 'e': 'f, g'}: a comma parts where `name=` follows.

    Raises ValueError for a piece without '=', an empty side, or a column named twice.
    """
    found: dict[str, str] = {}
    for text in given:
        for piece in re.split(r",(?=\s*\w+\s*=)", text):
            ours, equals, theirs = (part.strip() for part in piece.partition("="))
            if not (ours and equals and theirs):
                raise ValueError(f"{option} {piece!r}: expected COLUMN=VALUE, as in layer=Name,rel_mse=MSE")
            if ours in found:
                raise ValueError(f"{option}: {ours} is given twice: {found[ours]!r} and {theirs!r}")
            found[ours] = theirs
    return found


def _choose(cells: Cells, mapping: dict[str, str], constants: dict[str, str]) -> dict[str, str]:
    """Their column by ours. ValueError for names that do not exist, on either side, and for what is missing."""
    ours = [name for name in _KINDS if name not in _OWN]
    for name in (*mapping, *constants):
        if name not in ours:
            raise ValueError(f"{name!r} is no column of a per_layer table{_near(name, ours)}; see data/README.md")
    for name, theirs in mapping.items():
        if theirs not in cells.header:
            raise ValueError(f"{cells.file}: no column {theirs!r} to take {name} from{_near(theirs, cells.header)}")
    if both := set(mapping) & set(constants):
        raise ValueError(f"{', '.join(sorted(both))} is both mapped and set; choose one")
    own = {name: name for name in cells.header if name in ours and name not in mapping and name not in constants}
    chosen = mapping | own
    if "layer" not in chosen:
        raise ValueError(f"{cells.file}: which column names the layer? --map layer=NAME{_near('layer', cells.header)}")
    if "variant" not in (*chosen, *constants):
        raise ValueError(f"{cells.file}: which kernel was measured? --set variant=shipped, or --map variant=NAME")
    if not set(chosen) & set(MEASURED):
        raise ValueError(f"{cells.file}: nothing measured; --map rel_mse=NAME{_near('rel_mse', cells.header)}")
    return chosen


def _near(name: str, names: Iterable[str]) -> str:
    names = list(names)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    listed = ", ".join(map(repr, names[:12])) + (", ..." if len(names) > 12 else "")
    return f" (did you mean {close[0]!r}?)" if close else f" (there are {listed})"


def _rename(layers: list[str], regex: str | None, name: str | None, cells: Cells) -> list[str]:
    """Layer names with the pattern replaced where it matches the whole name."""
    for line, layer in zip(cells.lines, layers, strict=True):
        if not layer:
            raise ValueError(str(Problem(cells.file, f"line {line}", "layer", "an empty cell", "the layer's name")))
    if regex is None:
        if name is not None:
            raise ValueError(f"--layer-name {name!r} needs --layer-regex: the pattern whose groups it uses")
        return layers
    try:
        pattern = re.compile(regex)
        matches = [pattern.fullmatch(layer) for layer in layers]
        renamed = [
            layer if match is None or name is None else match.expand(name)
            for layer, match in zip(layers, matches, strict=True)
        ]
    except (re.error, IndexError) as error:
        raise ValueError(f"layer pattern {regex!r} with name {name!r}: {error}") from None
    if not any(matches):
        raise ValueError(
            f"layer pattern {regex!r} matches none of the layers, e.g. {layers[0]!r}; it must match all of a name"
        )
    if left := [layer for layer, match in zip(layers, matches, strict=True) if match is None]:
        cells.notes.append(f"{len(left)} layer name(s) left as they are, e.g. {left[0]!r}")
    return renamed


def _label(frame: pd.DataFrame, regex: str | None) -> pd.DataFrame:
    """Block, attention and projection from the layers' names, by the given pattern or a preset's, where not given."""
    patterns = [sites.SitePattern("given", regex)] if regex else list(sites.PRESETS.values())
    found = [next(filter(None, (sites.parse_site(layer, p) for p in patterns)), None) for layer in frame["layer"]]
    block = pd.Series([-1 if site is None else site.block for site in found], dtype="Int64")
    frame["block"] = frame["block"].fillna(block)
    for name in ("attention", "projection"):
        label = pd.Series(["" if site is None else getattr(site, name) for site in found], dtype="string")
        frame[name] = frame[name].where(frame[name] != "", label)
    return frame


def derive(frame: pd.DataFrame) -> list[str]:
    """Fill empty metrics that follow from others in place, by the contract's own identities; says which."""
    with np.errstate(divide="ignore", invalid="ignore"):
        _fill(frame, "rel_mse", 10 ** (-frame["sqnr_db"] / 10))
        mse, cosine = frame["rel_mse"], frame["error_output_cosine"]
        made = {
            "sqnr_db": -10 * np.log10(mse),
            "shrinkage": -cosine * np.sqrt(mse),
            "residual_rel_mse": mse * (1 - cosine**2),
        }
    complete = frame[[*schema.SUM_NAMES, "in_features"]].notna().all(axis=1)
    sums = frame[[*schema.SUM_NAMES, "in_features"]].astype("float64")
    made = {name: pd.Series(v).where(complete) for name, v in summary.metrics(sums).items()} if complete.any() else made
    filled = [name for name, values in made.items() if _fill(frame, name, values)]
    return [f"derived: {', '.join(filled)}"] if filled else []


def _fill(frame: pd.DataFrame, name: str, values: pd.Series) -> bool:
    empty = frame[name].isna() & values.notna()
    frame[name] = frame[name].where(~empty, values)
    return bool(empty.any())


def _check_keys(frame: pd.DataFrame, cells: Cells) -> None:
    double = frame.duplicated(schema.PER_LAYER_KEY).to_numpy()
    if double.any():
        at = int(double.argmax())
        key = {name: str(frame[name].iloc[at]) for name in schema.PER_LAYER_KEY[1:]}
        first = int((frame[list(key)] == pd.Series(key)).all(axis=1).to_numpy().argmax())
        raise ValueError(
            f"{cells.file}: line {cells.lines[at]} repeats the key of line {cells.lines[first]}: "
            f"{', '.join(f'{k}={v}' for k, v in key.items())}; one row a layer and kernel"
        )
