"""`shrinkage report` over folders of many runs: pooled where they measured the same, side by side where not."""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
import pytest
from synthetic import make_calls, make_run

from analysis.report import pooled, style
from analysis.report.chapter import Chapter
from analysis.report.html import build_report
from analysis.results import many, pool, schema, sources

sys.path.insert(0, str(Path(__file__).parents[1] / "results"))
from made_up_runs import INFO, write_run

many.duckdb()


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch):
    monkeypatch.setattr(style, "render", lambda made: (b"PNG", '<svg viewBox="0 0 1 1"></svg>'))


@pytest.fixture
def cluster(tmp_path):
    """Four runs of 8 layers, 3 calls each."""
    folder = tmp_path / "a cluster"
    for number in range(4):
        write_run(folder / f"run-{number}", make_calls(8, 3, seed=number), seed=number)
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_folder_of_runs_is_pooled(cluster, tmp_path):
    before = files(cluster)
    report = build_report([cluster], tmp_path / "out")
    page = report.index.read_text(encoding="utf-8")
    assert "a cluster" in page or report.headlines[0].startswith("The magnitude shrinkage")
    assert 'id="runs"' in page and "The 4 runs" in page
    assert "bootstrap over runs" in page and "over calls" not in page.split('id="definitions"')[0]
    assert "too few for intervals" not in page
    assert "[" in report.headlines[0]
    assert files(cluster) == before
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["figures", "index.html", "report.md"]
    again = build_report([cluster], tmp_path / "out")  # its own report may be replaced
    assert again.index.read_text(encoding="utf-8") == page


def test_the_pool_is_what_merge_writes(cluster, tmp_path):
    pool.merge_runs(sources.find_runs([cluster]), tmp_path / "merged")
    with pooled.opened([cluster]) as found:
        (run,) = found.runs
        assert run.name == "a cluster"
        merged = schema.read_per_layer(tmp_path / "merged" / schema.PER_LAYER)
        pd.testing.assert_frame_equal(run.per_layer, merged)
        chapter = Chapter(run)
        assert chapter.unit == "run" and chapter.per_call["call"].nunique() == 4
        total = chapter.per_call.groupby(["layer", "variant"])["sum_ee"].sum()
        expected = merged.set_index(["layer", "variant"])["sum_ee"]
        assert total.sort_index().to_numpy() == pytest.approx(expected.sort_index().to_numpy(), rel=1e-12)
    page = build_report([tmp_path / "merged"], tmp_path / "merged").index.read_text(encoding="utf-8")
    assert "The 4 runs" in page


def test_runs_that_differ_stand_side_by_side_and_the_page_says_why(cluster, tmp_path):
    write_run(cluster / "other", make_calls(8, 3), world="another world")
    report = build_report([cluster], tmp_path / "out")
    assert len(report.headlines) == 5
    page = report.index.read_text(encoding="utf-8")
    assert "are not pooled" in page and "world is &#39;synthetic&#39;" in page


def test_too_many_runs_that_differ_are_refused(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(pooled, "SIDE_BY_SIDE", 3)
    write_run(cluster / "other", make_calls(8, 3), world="another world")
    with pytest.raises(ValueError, match="world is 'synthetic'"):
        build_report([cluster], tmp_path / "out")


def test_parts_of_one_run_are_joined(tmp_path):
    calls = make_calls(8, 6)
    for name, part in (("a", calls[calls["call"] < 3]), ("b", calls[calls["call"] >= 3])):
        write_run(tmp_path / "parts" / name, part)
    write_run(tmp_path / "whole", calls)
    with pooled.opened([tmp_path / "parts"]) as found:
        assert found.runs[0].name == "parts"
        whole = schema.read_per_layer(tmp_path / "whole" / schema.PER_LAYER)
        pd.testing.assert_frame_equal(found.runs[0].per_layer, whole)


def test_a_folder_with_one_run_below_and_the_report_inside_it(tmp_path):
    run = make_run(tmp_path / "runs" / "one", 8, 3)
    report = build_report([tmp_path / "runs"], run)
    assert report.index == run / "index.html"
    assert "over calls" in report.index.read_text(encoding="utf-8")


def test_two_pooled_runs_have_no_intervals_and_the_page_says_so(tmp_path):
    for number in range(2):
        write_run(tmp_path / "runs" / f"run-{number}", make_calls(8, 3, seed=number), seed=number)
    page = build_report([tmp_path / "runs"], tmp_path / "out").index.read_text(encoding="utf-8")
    assert "Only 2 run(s) were pooled" in page
    assert INFO["world"] in page
