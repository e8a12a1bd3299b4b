"""codes.parquet: how often each activation code occurs, by layer and kernel. Torch-free.

Counts are exact over a stated sample: forward passes 0, 7, 14, ... of the run (7 has no factor in common with the usual
numbers of denoising steps, so that every step is met in turn), and of each layer's input in them every n-th row, at
most 128. Rows with NaN or Inf do not count; padding counts where `tokens` says so. A code that does not occur has no
row.

    table = frame({"blocks.0.q": counts}, ["shipped", "fixed"], ["all"])     # counts: int64 [V, 2, 256]
    shares(table).loc[("blocks.0.q", "shipped"), 0]                          # share of codes that are 0
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.results import studies, tables

EVERY_CALL, MOST_ROWS = 7, 128
SAMPLE = f"every {EVERY_CALL}th forward pass, at most {MOST_ROWS} evenly spaced rows of each"
LOWEST, BINS = -128, 256  # codes are int8: -128 .. 127
KEY = ["layer", "variant", "tokens", "code"]


def counted(call: int) -> bool:
    """Whether the codes of this forward pass are counted."""
    return call % EVERY_CALL == 0


def stride(rows: int) -> int:
    """Every how many rows one counts: the least odd number that leaves at most MOST_ROWS of them.

    Odd, since tokens lie on grids of even widths: an even stride would meet few of their columns.
    """
    return max(1, -(-rows // MOST_ROWS)) | 1 if rows > MOST_ROWS else 1


def frame(counts: Mapping[str, np.ndarray], variants: Sequence[str], tokens: Sequence[str]) -> pd.DataFrame:
    """The rows of studies.CODES, without version and run id.

    Args:
        counts: int64 [V, 2, 256] by layer: of valid rows, and of padding.
        variants: names, in the order of the first axis.
        tokens: 'all' (both groups) and / or 'valid' (the first).
    """
    if not counts:
        return _empty()
    held = np.stack(list(counts.values()))  # [L, V, 2, 256]
    total = np.stack([held[:, :, 0] if choice == "valid" else held.sum(axis=2) for choice in tokens], axis=2)
    found = np.nonzero(total)
    names = [np.array(list(words), dtype=object) for words in (counts, variants, tokens)]
    columns = {key: words[at] for key, words, at in zip(KEY, names, found, strict=False)}
    return pd.DataFrame(columns | {"code": found[3] + LOWEST, "count": total[found]})


def write(table: pd.DataFrame, folder: Path, run_id: str) -> None:
    """Write codes.parquet beside a run's other tables; where nothing was counted there is none."""
    if table.empty:
        (folder / studies.CODES.file).unlink(missing_ok=True)
    else:
        tables.write(studies.CODES, table, folder, run_id)


def find(folder: Path) -> pd.DataFrame | None:
    """The table in a run's folder, None where it has none. ValueError names the file and the row that cannot be."""
    table = tables.find(studies.CODES, folder)
    if table is None:
        return None
    for column, low, high in (("code", LOWEST, LOWEST + BINS - 1), ("count", 1, np.inf)):
        wrong = ~table[column].between(low, high).fillna(False).to_numpy(bool)
        if wrong.any():
            row = int(wrong.argmax())
            raise ValueError(
                f"{folder / studies.CODES.file}: row {row}, column {column!r}: "
                f"{table[column].iloc[row]}, expected {low} .. {high}"
            )
    return table


def add(frames: Sequence[pd.DataFrame], replicated: Collection[str] = ()) -> pd.DataFrame:
    """The counts of several ranks of one run, added; a replicated layer counts as the first rank that has it did."""
    stacked = pd.concat([f.assign(_rank=rank) for rank, f in enumerate(frames)], ignore_index=True)
    first = stacked.groupby("layer")["_rank"].transform("min")
    stacked = stacked[~stacked["layer"].isin(list(replicated)) | (stacked["_rank"] == first)]
    return stacked.groupby(KEY, sort=False, as_index=False)["count"].sum()[[*KEY, "count"]]


def add_folders(folders: Sequence[Path], replicated: Collection[str], out: Path, run_id: str) -> None:
    """Add the ranks' tables into `out`; where one of the ranks has none, `out` gets none."""
    found = [tables.find(studies.CODES, folder) for folder in folders]
    held = [table for table in found if table is not None]
    write(add(held, replicated) if len(held) == len(found) else _empty(), out, run_id)


def shares(table: pd.DataFrame) -> pd.DataFrame:
    """Share of each code among all counted, one row a (layer, variant), one column a code -128 .. 127.

    For one run and choice of tokens.
    """
    wide = wide_counts(table)
    return wide.div(wide.sum(axis=1), axis=0)


def wide_counts(table: pd.DataFrame) -> pd.DataFrame:
    """Counts, one row a (layer, variant) in order of appearance, one column a code -128 .. 127."""
    keys = pd.MultiIndex.from_frame(table[["layer", "variant"]].astype(object))
    rows, names = pd.factorize(keys)
    columns = table["code"].to_numpy(np.int64) - LOWEST
    size = len(names) * BINS
    flat = np.bincount(rows * BINS + columns, table["count"].to_numpy(np.float64), minlength=size)
    index = pd.MultiIndex.from_tuples(list(names), names=["layer", "variant"])
    return pd.DataFrame(flat.reshape(-1, BINS), index=index, columns=range(LOWEST, LOWEST + BINS))


def _empty() -> pd.DataFrame:
    kinds = {c.name: c.dtype for c in studies.CODES.body}
    return pd.DataFrame({name: pd.Series(dtype=kind) for name, kind in kinds.items()})
