"""Which folders hold runs, and which of them may be put together.

A run's folder holds run.json or one of its tables; what lies below one (ranks that are already merged, a store) is part
of it. A folder of runs is any folder with such folders below.

    runs = find_runs(["cluster/rollouts"])       # in order of path
    check_compatible(runs)                       # ValueError names the field that differs, and in which two
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.results import schema

PER_RUN = "per_run.parquet"
_MARKS = {schema.RUN, schema.PER_LAYER, schema.PER_CALL}
_SAME = ("world", "checkpoint_sha256", "script_sha256", "sites", "reference", "tokens", "sampling", "kernel")
_IDENTICAL = ("clips", "seed", "engine", "device", "versions", "launch", "ranks", "layers_replicated")


@dataclass(frozen=True)
class RunFolder:
    """A run on disk: its folder, a name for messages and tables, and its run.json."""

    path: Path
    name: str
    info: dict[str, Any]

    @property
    def run_id(self) -> str:
        return str(self.info["run_id"])

    @property
    def per_call(self) -> Path:
        return self.path / schema.PER_CALL


def run_folders(path: str | Path) -> list[Path]:
    """The folder itself if it is a run's, else the runs' folders below it, in natural order of path."""
    found = []
    for folder, below, files in os.walk(path, onerror=_refuse):
        if _MARKS & set(files):
            found.append(Path(folder))
            below.clear()
        below[:] = [name for name in below if not name.startswith(".")]
    return sorted(found, key=lambda p: _natural(p.as_posix()))


def _refuse(error: OSError) -> None:
    raise ValueError(f"{error.filename} cannot be read: {error.strerror}") from None


def _natural(name: str) -> list[tuple[int, int, str]]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name) if part]


def find_runs(paths: Sequence[str | Path], out: str | Path | None = None) -> list[RunFolder]:
    """Every run in the given folders, in order of the arguments. Runs in which nothing was measured are left out.

    Args:
        out: where their merger will stand; a folder below the given ones is passed over if it is this one.

    Raises:
        ValueError: a path is no folder, holds no run, is given twice or is `out`, or a run lacks what merging needs.
    """
    runs: list[RunFolder] = []
    seen: set[Path] = set()
    own = None if out is None else Path(out).resolve()
    for given in map(Path, paths):
        if not given.is_dir():
            what = "is a file" if given.exists() else "does not exist"
            raise ValueError(f"{given} {what}; name a run's folder, which holds {schema.PER_CALL} and {schema.RUN}")
        if given.resolve() == own:
            raise ValueError(f"{given} is both merged and written; choose another --out")
        folders = [folder for folder in run_folders(given) if folder.resolve() != own]
        if not folders:
            raise ValueError(f"{given}: no run in this folder or below it; a run's folder holds {schema.RUN}")
        for folder in folders:
            if folder.resolve() in seen:
                raise ValueError(f"{folder} is given twice; name each run once")
            seen.add(folder.resolve())
            name = folder.name if folder == given else folder.relative_to(given).as_posix()
            run = RunFolder(folder, name or str(given), _info(folder))
            if run.per_call.is_file():
                runs.append(run)
            elif run.info.get("calls") != 0:
                raise ValueError(f"{folder}: no {schema.PER_CALL}: {_why(run)}")
    if not runs:
        raise ValueError(f"nothing was measured in {', '.join(map(str, paths))}")
    return runs


def _info(folder: Path) -> dict[str, Any]:
    if not (folder / schema.RUN).is_file():
        raise ValueError(
            f"{folder}: no {schema.RUN}, so nothing says what its tables measured; get it from whoever made the run"
        )
    info = schema.read_run(folder / schema.RUN)
    if "run_id" not in info:
        raise ValueError(f"{folder / schema.RUN}: no run_id; is this the {schema.RUN} of a run?")
    return info


def _why(run: RunFolder) -> str:
    if "merged" in run.info:
        return "it was merged from several runs; merge those again, with the new ones"
    if "imported" in run.info:
        return "it was imported; `shrinkage compare` takes it"
    return "sums per call are what merging adds; get it from whoever made the run"


def check_compatible(runs: Sequence[RunFolder]) -> None:
    """Raise ValueError unless all runs measured the same thing: world, checkpoint, kernels, reference, tokens, ..."""
    hashes: dict[str, tuple[str, RunFolder]] = {}
    for run in runs:
        _check_fields(runs[0], run, _SAME, "`shrinkage compare` puts them side by side instead")
        variants = run.info.get("variants")
        for name, source in variants.items() if isinstance(variants, dict) else ():
            known, where = hashes.setdefault(name, (source, run))
            if source != known:
                raise ValueError(
                    f"{run.path}: variants.{name} (the kernel's hash) is {source!r}, {where.path} has {known!r}; "
                    "`shrinkage compare` puts them side by side instead"
                )


def check_parts(parts: Sequence[RunFolder], but: Iterable[str] = ()) -> None:
    """Raise ValueError unless the runs can be parts of one: compatible, and equal in seed, device, versions, ..."""
    check_compatible(parts)
    for part in parts:
        fields = [name for name in (*_IDENTICAL, "scenes") if name not in but]
        _check_fields(parts[0], part, fields, "these are different runs: --as runs")


def _check_fields(first: RunFolder, other: RunFolder, fields: Iterable[str], remedy: str) -> None:
    for name in fields:
        here, there = other.info.get(name), first.info.get(name)
        if here != there:
            raise ValueError(f"{other.path}: {name} is {_brief(here)}, {first.path} has {_brief(there)}; {remedy}")


def _brief(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 120 else shown[:117] + "..."
