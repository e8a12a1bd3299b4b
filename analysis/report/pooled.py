"""Which runs a report is about: folders of runs, folders of many runs, and what `shrinkage merge` left of many.

A folder that holds no run but has runs below it is pooled, as `shrinkage merge` does: sums add, and a run takes the
place of a call in every interval. Runs that cannot be pooled stand side by side where they are few.

    with opened(["cluster/rollouts"]) as found:
        found.runs, found.note
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pandas as pd

from analysis.report import layout, text
from analysis.report.blocks import Cell, Section, Table
from analysis.results import schema, sources
from analysis.results.load import Run, load_run

if TYPE_CHECKING:
    from analysis.report.chapter import Chapter

RUNS = "runs.csv"
SIDE_BY_SIDE = 12  # runs that cannot be pooled; more of them would be a page that nobody reads
_LISTED = 20  # runs in the Markdown twin
_FIELDS = ("seed", "device")


@dataclass(frozen=True, eq=False)
class NamedRun(Run):
    """A run that goes by another name than its folder's."""

    label: str = ""

    @property
    def name(self) -> str:
        return self.label or super().name


@dataclass(frozen=True, eq=False)
class PooledRun(NamedRun):
    """What merging left of many runs. A row of `per_call` is a whole run: intervals are over runs."""

    unit: ClassVar[str] = "run"

    @cached_property
    def runs(self) -> pd.DataFrame:
        """runs.csv: one row a run, kernel, reference and choice of tokens."""
        return pd.read_csv(self.path / RUNS, dtype={"run_id": "string", "folder": "string"})

    @cached_property
    def per_call(self) -> pd.DataFrame | None:
        """per_run.parquet with a run in the place of a call."""
        table = pd.read_parquet(self.path / sources.PER_RUN)
        order = {run_id: number for number, run_id in enumerate(table["run_id"].unique())}
        folders = self.runs.drop_duplicates("run_id").set_index("run_id")["folder"]
        pooled = str(self.per_layer["run_id"].iloc[0])
        table = table.assign(
            call=table["run_id"].map(order).astype("Int64"),
            scene=table["run_id"].map(folders),
            clip=pd.array([None] * len(table), dtype="Int64"),
            step=pd.array([None] * len(table), dtype="Int64"),
            run_id=pooled,
        )
        names = [c.name for c in schema.PER_CALL_COLUMNS]
        return schema.conform(table[names], schema.PER_CALL_COLUMNS, str(self.path / sources.PER_RUN))


@dataclass(frozen=True)
class Opened:
    """The runs of a report, and what is to be said of how they were found."""

    runs: list[Run]
    note: str = ""


@contextmanager
def opened(paths: Sequence[Path]) -> Iterator[Opened]:
    """The runs in the given folders; pooled tables live as long as the block.

    Raises:
        ValueError: a folder holds no run, or more than a few that cannot be pooled; the message says why.
    """
    with ExitStack() as stack:
        runs: list[Run] = []
        notes: list[str] = []
        for path in paths:
            below = [] if not path.is_dir() else sources.run_folders(path)
            if not below or below == [path]:
                runs.append(_load(path))
            elif len(below) == 1:
                runs.append(_load(below[0]))
            else:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                try:
                    runs.append(_pool(path, folder))
                except ValueError as error:
                    if len(below) > SIDE_BY_SIDE:
                        raise
                    runs += [_load(folder) for folder in below]
                    notes.append(f"The runs in {path} stand side by side and are not pooled: {error}.")
        yield Opened(runs, " ".join(notes))


def _load(path: Path) -> Run:
    merged = all((path / name).is_file() for name in (schema.PER_LAYER, sources.PER_RUN, RUNS))
    return PooledRun(path) if merged and not (path / schema.PER_CALL).exists() else load_run(path)


def _pool(path: Path, into: Path) -> Run:
    from analysis.results import folder, parts, pool  # here, for few reports need them

    found = sources.find_runs([path])
    if len({run.run_id for run in found}) == 1:
        folder.write_run_folder(into, *parts.join(found))
        return NamedRun(into, path.resolve().name)
    pool.merge_runs(found, into, f"shrinkage merge {shlex.quote(path.as_posix())} --out RUN")
    return PooledRun(into, path.resolve().name)


def section(chapter: Chapter) -> Section | None:
    """One row a run and kernel of a pool; None for a run that is none."""
    run = chapter.run
    if not isinstance(run, PooledRun):
        return None
    _, reference, tokens = chapter.slice
    table = run.runs[(run.runs["reference"] == reference) & (run.runs["tokens"] == tokens)]
    order = layout.variants(table)
    fields = [name for name in _FIELDS if name in table and table[name].notna().any()]
    rows = []
    place_of = {run_id: place for place, run_id in enumerate(dict.fromkeys(table["run_id"]))}
    records = table.to_dict("records")
    records.sort(key=lambda row: (place_of[row["run_id"]], order.index(row["variant"])))
    for place, row in enumerate(records):
        rows.append(
            (
                Cell(str(row["folder"]), place),
                Cell(str(row["variant"]), order.index(row["variant"])),
                *(Cell(text.EMPTY if pd.isna(row[name]) else str(row[name])) for name in fields),
                *(Cell(str(int(row[name])), float(row[name])) for name in ("layers", "calls")),
                *(_cell(row[f"{kind}_rel_mse"], text.scientific(row[f"{kind}_rel_mse"])) for kind in _KINDS),
                _cell(row["mean_cosine"], text.cosine(row["mean_cosine"])),
                _cell(row["mean_shrinkage"], text.percent(row["mean_shrinkage"])),
            )
        )
    headers = ("run", "kernel", *fields, "layers", "calls", "relative MSE, mean", "pooled", "median", "cosine, mean")
    numeric = tuple(range(2 + len(fields), len(headers) + 1))
    said = "One row a run and kernel, means over its layers. Everywhere else on this page the runs are pooled."
    made = Table((*headers, "shrinkage, mean"), tuple(rows), numeric, sortable=True, short=_LISTED, caption=said)
    return Section("runs", f"The {table['run_id'].nunique()} runs", (made,))


_KINDS = ("mean", "pooled", "median")


def _cell(value: float, shown: str) -> Cell:
    return Cell(shown, float(value) if np.isfinite(value) else None)
