"""The histograms of codes in the report: what the page holds and what the figure says is what the table holds."""

from __future__ import annotations

import json

import numpy as np
import pytest
from synthetic import make_run
from synthetic_codes import add_codes

from analysis.report import codes, details, style, text
from analysis.report.chapter import Chapter
from analysis.report.html import build_report
from analysis.results import studies, tables
from analysis.results.load import load_run
from analysis.results.validate import validate

KERNELS = ["shipped", "fixed"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = make_run(tmp_path_factory.mktemp("codes") / "run", 4, 3)
    add_codes(folder)
    return folder


def shares_of(table, layer, kernel):
    mine = table[(table["layer"] == layer) & (table["variant"] == kernel)].set_index("code")["count"]
    return (mine / mine.sum()).reindex(range(-128, 128), fill_value=0)


def test_the_page_holds_the_shares_of_the_table(run):
    chapter = Chapter(load_run(run))
    table = codes.of(chapter)
    names = list(dict.fromkeys(table["layer"]))
    held = details.build(chapter.per_layer, None, names, codes=table)
    unit = held["codes"]["unit"]
    for name, layer in zip(names, held["layers"], strict=True):
        for kernel, (first, units, zeros, total) in zip(KERNELS, layer["codes"], strict=True):
            expected = shares_of(table, name, kernel)
            got = np.zeros(256)
            got[first + 128 : first + 128 + len(units)] = np.array(units) * unit
            assert np.abs(got - expected).max() <= 0.51 * unit
            assert units[0] and units[-1], "empty tails are held"
            assert zeros == text.percent(expected[0]) and total == "20,000"
    json.dumps(held, allow_nan=False)


def test_the_zero_bin_of_truncation_is_about_twice_as_wide_and_a_swap_is_seen(run):
    table = codes.of(Chapter(load_run(run)))
    means = codes.mean_shares(table)
    assert 1.8 < means.loc["shipped", 0] / means.loc["fixed", 0] < 2.1
    swapped = table.assign(variant=table["variant"].map({"shipped": "fixed", "fixed": "shipped"}))
    names = table["layer"].unique()
    one, other = (codes.compact(t, names, KERNELS)["layers"] for t in (table, swapped))
    assert one != other and one[0] == other[0][::-1]


def test_a_layer_or_kernel_that_was_not_counted_is_null(run):
    table = codes.of(Chapter(load_run(run)))
    first = table["layer"].iloc[0]
    part = table[~((table["layer"] == first) & (table["variant"] == "fixed"))]
    held = codes.compact(part, [first, "elsewhere"], KERNELS)["layers"]
    assert held[0][0] is not None and held[0][1] is None and held[1] == [None, None]


def test_the_figure_says_how_many_codes_are_zero(run):
    table = codes.of(Chapter(load_run(run)))
    means = codes.mean_shares(table)
    with style.context():
        _, ax = style.figure()
        codes.near_zero(table, ax)
    zeros = [text.percent(means.loc[kernel, 0]) for kernel in KERNELS]
    assert ax.get_title(loc="left") == f"How many codes are 0: shipped {zeros[0]}, fixed {zeros[1]}"
    heights = [[bar.get_height() for bar in bars] for bars in ax.containers]
    assert heights == [means.loc[kernel, list(range(-8, 9))].tolist() for kernel in KERNELS]


def test_only_a_run_with_counts_has_histograms(run, tmp_path):
    plain = make_run(tmp_path / "plain", 4, 3)
    other_id = make_run(tmp_path / "other", 4, 3)
    add_codes(other_id)
    table = load_run(other_id).codes
    assert codes.of(Chapter(load_run(plain))) is None and table is not None
    pages = [build_report([path], tmp_path / f"out-{path.name}").index.read_text() for path in (plain, run)]
    assert '"sample":' not in pages[0] and '"sample":' in pages[1]
    assert (tmp_path / f"out-{run.name}" / "figures" / "codes.png").exists()
    assert not (tmp_path / "out-plain" / "figures" / "codes.png").exists()


def test_counts_of_another_run_are_not_shown(run, tmp_path):
    chapter = Chapter(load_run(run))
    table = chapter.run.codes
    assert table is not None
    chapter.run.__dict__["codes"] = table.assign(run_id="another")
    try:
        assert codes.of(chapter) is None
    finally:
        chapter.run.__dict__["codes"] = table


def test_validate_reads_the_counts_and_names_the_row_that_cannot_be(run, tmp_path):
    sound = [checked for checked in validate(run) if checked.kind == studies.CODES.file]
    assert len(sound) == 1 and sound[0].problems == [] and sound[0].frame is not None
    table = load_run(run).codes
    assert table is not None
    for column, value in (("code", 128), ("count", 0)):
        wrong = table.drop(columns=["schema_version", "run_id"]).copy()
        wrong.loc[3, column] = value
        tables.write(studies.CODES, wrong, tmp_path, "abc")
        (checked,) = validate(tmp_path / studies.CODES.file)
        assert f"row 3, column '{column}': {value}, expected" in checked.problems[0].found
