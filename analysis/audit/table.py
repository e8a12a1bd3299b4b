"""Reports of many kernels as one table, the one behind `data/kernel-audits.csv`. Needs no torch.

One row is one kernel on one device. Figures are those of the worst input dtype; edge findings are `check: input -> got`
joined by "; ", defects and notes in columns of their own.

    write(sorted(Path("audits").glob("*.json")), Path("data/kernel-audits.csv"))
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.audit.findings import DEFECT

COLUMNS = {
    "project": "repository",
    "file": "path in the repository",
    "function": "what was called",
    "variant": "name of the adapter that called it, if its signature needed one",
    "commit": "commit or release",
    "device": "cpu (Triton kernels in the interpreter) or cuda",
    "hardware": "what it ran on",
    "rounding": "verdict of the worst input dtype",
    "clean": "no defect found",
    "rounding_bfloat16": "verdict for bf16 input; empty where refused",
    "rounding_float16": "verdict for fp16 input; empty where refused",
    "rounding_float32": "verdict for fp32 input; empty where refused",
    "code_mismatch": "fraction of codes that differ from half even, ties excepted",
    "magnitude_bias_lsb": "mean of |code| - |s|, in steps",
    "mean_error_lsb": "mean of code - s, in steps",
    "rmse_lsb": "RMS of code - s, in steps",
    "row_gain": "projection of the dequantised row on the row",
    "scales": "layout, shape, dtype and meaning of the scales",
    "defects": "edge findings that are wrong results for legitimate input",
    "notes": "choices, refusals, and what happens to NaN and Inf",
    "torch": "version",
    "triton": "version; empty where it was not used",
    "seed": "of the inputs",
}
KEY = ("project", "file", "function", "variant", "device")
_TEXT_LIMIT = 160


def rows(reports: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """One row a report (the JSON of `AuditReport`, read back), columns as `COLUMNS`."""
    frame = pd.DataFrame([_row(report) for report in reports], columns=list(COLUMNS))
    return frame.sort_values(list(KEY), kind="stable", ignore_index=True)


def write(paths: Iterable[Path], out: Path) -> pd.DataFrame:
    """Read reports, write the table as CSV with floats that read back equal. ValueError when there are none."""
    reports = [json.loads(path.read_text()) for path in paths]
    if not reports:
        raise ValueError("no audit reports to write; run shrinkage audit with --json first")
    frame = rows(reports)
    frame.to_csv(out, index=False)
    return frame


def notes() -> str:
    """What `data/kernel-audits.md` says: how the table is made and what its columns mean."""
    lines = [
        "# Audits of public quantisers",
        "",
        "`kernel-audits.csv` has one row a kernel and device. It is written by `analysis.audit.table` from reports of",
        "`shrinkage audit`; the kernels themselves are not part of this project. Codes are compared with the input",
        "rounded in fp64, and figures are those of the worst input dtype.",
        "",
        "| column | meaning |",
        "| --- | --- |",
        *(f"| `{name}` | {meaning} |" for name, meaning in COLUMNS.items()),
    ]
    return "\n".join(lines) + "\n"


def _row(report: dict[str, Any]) -> dict[str, Any]:
    source, figures, versions = report["source"], report["figures"], report["versions"]
    where, _, function = report["target"].rpartition(":")
    roundings = {f"rounding_{dtype}": entry["rounding"] for dtype, entry in report["by_dtype"].items()}
    numbers = ("code_mismatch", "magnitude_bias_lsb", "mean_error_lsb", "rmse_lsb", "row_gain")
    return {
        "project": source.get("project", ""),
        "file": source.get("file", where),
        "function": source.get("function", function),
        "variant": source.get("variant", ""),
        "commit": source.get("commit", ""),
        "device": report["device"],
        "hardware": versions["hardware"],
        "rounding": report["rounding"],
        "clean": report["clean"],
        **roundings,
        **{name: figures[name] for name in numbers},
        "scales": report["layout"],
        "defects": _findings(report, True),
        "notes": _findings(report, False),
        "torch": versions["torch"],
        "triton": versions.get("triton", "") if versions["hardware"] != "CPU" else "",
        "seed": report["seed"],
    }


def _findings(report: dict[str, Any], defects: bool) -> str:
    texts = []
    for finding in report["findings"]:
        if (finding["severity"] == DEFECT) is defects and not (defects and finding["check"] == "rounding"):
            dtypes = finding["dtypes"]
            where = f" ({', '.join(dtypes)})" if dtypes and len(dtypes) < len(report["dtypes"]) else ""
            text = f"{finding['check']}{where}: {finding['input']} -> {finding['got']}".replace("; ", ", ")
            texts.append(text if len(text) <= _TEXT_LIMIT else f"{text[: _TEXT_LIMIT - 3]}...")
    return "; ".join(texts)
