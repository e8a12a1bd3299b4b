"""The audits of public kernels (`data/kernel-audits.csv`) as rows for the report. No torch, no HTML, no plotting.

One row of the table is one kernel on one device. `figures` are those of the worst input dtype; edge findings are
`check: what came` joined by "; ", defects and notes in columns of their own.

    section = build(read(path))
    section.summary["truncate"], section.rows[0].verdict
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from analysis.audit.table import COLUMNS, KEY


@dataclass(frozen=True)
class AuditRow:
    """One kernel on one device, as text and numbers to lay out."""

    kernel: str
    commit: str
    device: str
    verdict: str
    clean: bool
    by_dtype: str
    code_mismatch: float
    magnitude_bias_lsb: float
    row_gain: float
    defects: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class AuditSection:
    """Rows in the order of severity, and how many kernels (not rows) have each verdict."""

    rows: tuple[AuditRow, ...]
    summary: dict[str, int]
    kernels: int
    projects: int
    disagreements: tuple[str, ...]  # kernels whose verdict differs between devices


def read(path: Path) -> pd.DataFrame:
    """The table, checked. ValueError names missing columns or a repeated key."""
    frame = pd.read_csv(path, keep_default_na=False, na_values=[""], dtype={"commit": str, "variant": str})
    if missing := [name for name in COLUMNS if name not in frame.columns]:
        raise ValueError(f"{path} lacks the columns {', '.join(missing)}; write it with analysis.audit.table")
    repeated = frame[frame.duplicated(list(KEY))]
    if len(repeated):
        raise ValueError(f"{path} has {len(repeated)} repeated rows, first {repeated.iloc[0][list(KEY)].tolist()}")
    return frame


def build(frame: pd.DataFrame) -> AuditSection:
    """Rows for the report from the table of `read`."""
    order = {name: i for i, name in enumerate(("other", "truncate", "floor", "double_rounded", "stochastic"))}
    ranked = frame.assign(rank=frame["rounding"].map(order).fillna(len(order)))
    ranked = ranked.sort_values(["rank", "clean", "project", "function", "device"], kind="stable")
    kernel = frame[list(KEY[:-1])].fillna("").agg(":".join, axis=1)
    verdicts = frame.groupby(kernel)["rounding"].agg(lambda values: sorted(set(values)))
    return AuditSection(
        rows=tuple(_row(entry) for _, entry in ranked.iterrows()),
        summary=frame.loc[~kernel.duplicated(), "rounding"].value_counts().to_dict(),
        kernels=int(kernel.nunique()),
        projects=int(frame["project"].nunique()),
        disagreements=tuple(str(name) for name, found in verdicts.items() if len(found) > 1),
    )


def _row(entry: pd.Series) -> AuditRow:
    dtypes = ("bfloat16", "float16", "float32")
    found = {dtype: entry[f"rounding_{dtype}"] for dtype in dtypes if isinstance(entry[f"rounding_{dtype}"], str)}
    return AuditRow(
        kernel=f"{entry['project']} {entry['function']}"
        + (f" ({entry['variant']})" if _text(entry["variant"]) else ""),
        commit=str(entry["commit"]),
        device=str(entry["device"]),
        verdict=str(entry["rounding"]),
        clean=bool(entry["clean"]),
        by_dtype=", ".join(f"{dtype} {rule}" for dtype, rule in found.items()),
        code_mismatch=float(entry["code_mismatch"]),
        magnitude_bias_lsb=float(entry["magnitude_bias_lsb"]),
        row_gain=float(entry["row_gain"]),
        defects=_texts(entry["defects"]),
        notes=_texts(entry["notes"]),
    )


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _texts(value: object) -> tuple[str, ...]:
    return tuple(_text(value).split("; ")) if _text(value) else ()
