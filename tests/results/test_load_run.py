"""A run folder as one object, and what is said when it is not one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from analysis.results import schema
from analysis.results.load import load_run

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "report"))
from synthetic import make_run


def test_tables_and_summary(tmp_path):
    run = load_run(make_run(tmp_path / "mine", 8, 3, world="<b>bold</b>"))
    assert (run.name, run.world) == ("mine", "<b>bold</b>")
    assert len(run.per_layer) == 16
    assert len(run.per_call) == 48
    assert run.info["calls"] == 3
    assert run.per_layer is run.per_layer  # read once
    shown = run._repr_html_()
    assert "shipped" in shown
    assert "&lt;b&gt;bold" in shown
    assert "<b>bold" not in shown


def test_tables_are_read_when_asked_for(tmp_path):
    folder = make_run(tmp_path / "run", 1, 1)
    (folder / schema.PER_CALL).write_text("not a table")
    run = load_run(folder)
    assert len(run.per_layer) == 2
    with pytest.raises(ValueError, match="not a Parquet file"):
        _ = run.per_call


def test_only_the_shared_file(tmp_path):
    folder = make_run(tmp_path / "run", 1, 1)
    (folder / schema.PER_CALL).unlink()
    (folder / schema.RUN).unlink()
    run = load_run(folder)
    assert run.per_call is None
    assert run.info == {}


def test_not_a_run(tmp_path):
    with pytest.raises(ValueError, match=r"found nothing; make one with: shrinkage measure --world tiny --out .*none"):
        load_run(tmp_path / "none")
    with pytest.raises(ValueError, match=r"no per_layer\.csv in this folder; make a run with"):
        load_run(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="found a file"):
        load_run(tmp_path / "file")
