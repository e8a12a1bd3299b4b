"""Reports as a table, the committed table, and its section of the report."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import planted_torch as planted
import pytest
import torch

from analysis.audit import audit, render
from analysis.audit.findings import Finding, merged
from analysis.audit.table import COLUMNS, notes, write
from analysis.report.audits import build, read

COMMITTED = Path(__file__).parents[2] / "data" / "kernel-audits.csv"


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    folder = tmp_path_factory.mktemp("audits")
    for name in ("truncate", "half_even"):
        source = {"project": f"example/{name}", "commit": "0000000", "file": "kernels.py"}
        audit(planted.ROUNDINGS[name], dtypes=[torch.float32, torch.bfloat16], source=source).write_json(
            folder / f"{name}.json"
        )
    audit(planted.wrong_scale, dtypes=[torch.float32]).write_json(folder / "wrong_scale.json")
    write(sorted(folder.glob("*.json")), folder / "table.csv")
    return folder / "table.csv"


def test_a_table_reads_back_equal(table):
    frame = read(table)
    assert list(frame.columns) == list(COLUMNS) and len(frame) == 3
    entry = frame[frame["project"] == "example/truncate"].iloc[0]
    report = json.loads((table.parent / "truncate.json").read_text())
    assert entry["magnitude_bias_lsb"] == report["figures"]["magnitude_bias_lsb"]
    assert entry["rounding"] == entry["rounding_bfloat16"] == "truncate" and not entry["clean"]
    assert pd.isna(entry["rounding_float16"])
    assert "scale_used" in frame[frame["function"] == "wrong_scale"].iloc[0]["defects"]


def test_the_section_has_the_worst_first_and_counts_kernels(table):
    section = build(read(table))
    assert section.kernels == 3 and section.summary == {"half_even": 2, "truncate": 1}
    assert section.rows[0].verdict == "truncate" and section.rows[0].by_dtype == "bfloat16 truncate, float32 truncate"
    assert section.disagreements == ()


def test_a_bad_table_is_refused(table, tmp_path):
    frame = pd.read_csv(table)
    frame.drop(columns=["rounding"]).to_csv(tmp_path / "short.csv", index=False)
    with pytest.raises(ValueError, match="lacks the columns rounding"):
        read(tmp_path / "short.csv")
    pd.concat([frame, frame]).to_csv(tmp_path / "twice.csv", index=False)
    with pytest.raises(ValueError, match="has 3 repeated rows"):
        read(tmp_path / "twice.csv")
    with pytest.raises(ValueError, match="no audit reports"):
        write([], tmp_path / "none.csv")


def test_the_committed_table_covers_what_the_section_says():
    section = build(read(COMMITTED))
    assert section.kernels >= 10
    carriers = {"SkyworkAI/Matrix-Game", "ModelTC/LightX2V", "Lightricks/LTX-Video-Q8-Kernels"}
    found = {row.kernel.split()[0]: row.verdict for row in section.rows if row.kernel.split()[0] in carriers}
    assert found == dict.fromkeys(carriers, "truncate")


def test_the_notes_beside_the_table_are_generated():
    assert COMMITTED.with_suffix(".md").read_text() == notes()


def test_findings_merge_over_dtypes_and_defects_come_first():
    note = Finding("nan", "note", "a", "b", "c", ("bfloat16",))
    defect = Finding("wrap", "defect", "a", "b", "c", ("bfloat16",))
    again = Finding("wrap", "defect", "x", "y", "z", ("float32",))
    assert merged([note, defect, again]) == [Finding("wrap", "defect", "a", "b", "c", ("bfloat16", "float32")), note]


def test_markdown_escapes_what_would_break_its_tables():
    report = audit(planted.refuses_odd, dtypes=[torch.float32])
    text = render.markdown(report)
    rows = [line for line in text.splitlines() if line.startswith("| note")]
    assert rows and all(line.replace("\\|", "").count("|") == 6 for line in rows)
