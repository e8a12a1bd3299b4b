"""The section on public kernels says what the committed table says."""

import pandas as pd
from synthetic import make_run

from analysis.report import public_kernels
from analysis.report.chapter import Chapter
from analysis.results.load import load_run


def test_every_audit_is_a_row_and_verdicts_are_counted(tmp_path):
    frame = pd.read_csv(public_kernels.find_table())
    section = public_kernels.section(Chapter(load_run(make_run(tmp_path))))
    text, table = section.blocks
    assert len(table.rows) == len(frame)
    kernels = frame.fillna("").drop_duplicates(["project", "file", "function", "variant", "commit"])
    truncating = int((kernels["rounding"] == "truncate").sum())
    assert truncating > 0 and f"{truncating} truncation toward zero" in text.text


def test_a_report_of_several_runs_and_a_missing_table_have_no_section(tmp_path, monkeypatch):
    run = load_run(make_run(tmp_path))
    assert public_kernels.section(Chapter(run, prefix="a-")) is None
    monkeypatch.setattr(public_kernels, "find_table", lambda: None)
    assert public_kernels.section(Chapter(run)) is None


def test_a_table_without_its_columns_is_refused(tmp_path, monkeypatch):
    (tmp_path / "t.csv").write_text("project\nx\n")
    monkeypatch.setattr(public_kernels, "find_table", lambda: tmp_path / "t.csv")
    run = load_run(make_run(tmp_path / "run"))
    try:
        public_kernels.section(Chapter(run))
    except ValueError as error:
        assert "lacks the columns" in str(error)
    else:
        raise AssertionError("a table without columns was accepted")
