"""Tables that a spreadsheet saved, and tables of other people: read where unambiguous, else named."""

from __future__ import annotations

import csv
import io
import re
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.results import foreign, numbers, schema, summary
from analysis.results.cells import read_cells

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "report"))
from synthetic import make_calls


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    path = tmp_path_factory.mktemp("original") / schema.PER_LAYER
    table = summary.summarize(make_calls(4, 3), "synthetic; with, separators")
    table.loc[0, "rel_mse"] = np.inf  # and an empty cell beside it
    table.loc[1, "error_output_cosine"] = np.nan
    schema.write_per_layer(table, path)
    return path


def table_of(path: Path) -> list[list[str]]:
    return list(csv.reader(io.StringIO(path.read_text(encoding="utf-8"))))


def saved(rows, delimiter=",", end="\n") -> str:
    out = io.StringIO()
    csv.writer(out, delimiter=delimiter, lineterminator=end).writerows(rows)
    return out.getvalue()


NUMERIC = {c.name for c in schema.PER_LAYER_COLUMNS if c.dtype != "string"}
WHOLE = {c.name for c in schema.PER_LAYER_COLUMNS if c.dtype == "Int64"}


def german(rows, thousands="."):
    """Decimal commas, and thousands in whole numbers."""
    header, *body = rows
    out = [header]
    for row in body:
        cells = []
        for name, cell in zip(header, row, strict=True):
            if name in WHOLE and cell:
                cell = f"{int(cell):,}".replace(",", thousands)
            elif name in NUMERIC:
                cell = cell.replace(".", ",")
            cells.append(cell)
        out.append(cells)
    return out


def english(rows):
    header, *body = rows
    return [header] + [
        [f"{int(c):,}" if n in WHOLE and c else c for n, c in zip(header, row, strict=True)] for row in body
    ]


SPREADSHEETS = {
    "bom": (lambda rows: ("\ufeff" + saved(rows)).encode(), "a byte order mark"),
    "crlf": (lambda rows: saved(rows, end="\r\n").encode(), "CRLF line ends"),
    "semicolons": (lambda rows: saved(rows, ";").encode(), "semicolon as separator"),
    "german": (lambda rows: ("\ufeff" + saved(german(rows), ";", "\r\n")).encode(), "decimal commas"),
    "german, spaces": (lambda rows: saved(german(rows, "\u202f"), ";").encode(), "thousands separators"),
    "english thousands": (lambda rows: saved(english(rows)).encode(), "thousands separators"),
    "utf-16 tabs": (lambda rows: b"\xff\xfe" + saved(rows, "\t").encode("utf-16-le"), "UTF-16 text"),
    "sep line": (lambda rows: ("sep=;\n" + saved(rows, ";")).encode(), "a first line that states the separator"),
    "reordered": (lambda rows: saved([row[::-1] for row in rows]).encode(), "columns in another order"),
    "added": (lambda rows: saved([["Note", *rows[0]], *(["ok", *r] for r in rows[1:])]).encode(), "ignored: Note"),
    "blank edges": (lambda rows: saved([*([*r, "", ""] for r in rows), [""] * 62]).encode(), "2 blank column(s)"),
    "capitals": (lambda rows: saved([[n.upper() for n in rows[0]], *rows[1:]]).encode(), None),
    "untouched": (lambda rows: saved(rows).encode(), None),
}


@pytest.mark.parametrize("kind", SPREADSHEETS)
def test_what_a_spreadsheet_does_is_undone(original, tmp_path, kind):
    make, note = SPREADSHEETS[kind]
    path = tmp_path / "with spaces in its name.csv"
    rows = table_of(original)
    if kind == "blank edges":
        rows = [row for row in rows if row]
    path.write_bytes(make(rows))
    reading = foreign.read_table(path)
    assert reading.problems == [] and reading.absent == []
    pd.testing.assert_frame_equal(reading.frame, schema.read_per_layer(original), check_exact=True)
    assert (note is None and not reading.notes) or any(note in found for found in reading.notes), reading.notes
    schema.write_per_layer(reading.frame, tmp_path / "back.csv")
    assert (tmp_path / "back.csv").read_bytes() == original.read_bytes()
    if kind not in ("untouched", "reordered", "crlf", "bom"):
        with pytest.raises(ValueError):  # the strict reader stays strict
            schema.read_per_layer(path)


BROKEN = {
    "empty": (b"", "is empty"),
    "blank": (b"\n \n", "is empty"),
    "header only": (b"layer,rel_mse\n", "has a header and no rows"),
    "one column": (b"layer\na\n", "has one column only"),
    "xlsx": (b"PK\x03\x04rest", "is a spreadsheet or archive"),
    "parquet": (b"PAR1rest", "is a Parquet file"),
    "latin-1": ("layer,rel_mse\na,1\nbl\u00f6cke,2\n".encode("latin-1"), "line 3: byte 0xf6 is not UTF-8"),
    "nul": (b"layer,rel_mse\na\x00,1\n", "NUL bytes"),
    "decimal comma between commas": (b"layer,rel_mse\na,0.5\nb,0,5\n", "line 3 has 3 cell.*a decimal comma cannot"),
    "short row": (b"layer;rel_mse;crest\na;1;2\nb;1\n", "line 3 has 2 cell.*header has 3 .separator: semicolon"),
    "open quote": (b'layer,rel_mse\n"a,1\n', "line 2"),
    "same name twice": (b"layer,rel_mse,rel_mse\na,1,2\n", "two columns are named 'rel_mse'"),
    "same name in other case": (b"layer,rel_mse,Rel_MSE\na,1,2\n", "differ in case only"),
    "no name": (b"layer,,rel_mse\na,x,2\n", "column 2 has cells and no name"),
    "two separators": (b"a,b;c\n1,2;3\n", "the separator may be comma or semicolon"),
    "nothing of ours": (b"name,error\na,1\n", "no column of a per_layer table; it has name, error.*shrinkage import"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_what_cannot_be_read_is_named(tmp_path, kind):
    data, message = BROKEN[kind]
    path = tmp_path / "broken.csv"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message) as stop:
        foreign.read_table(path)
    assert str(path) in str(stop.value)


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        foreign.read_table(tmp_path / "none.csv")


def parsed(cells, kind="float64", separator=","):
    values, problems = numbers.parse({"x": cells}, {"x": kind}, "f.csv", list(range(2, 2 + len(cells))), separator)
    return values["x"], [str(problem) for problem in problems]


@pytest.mark.parametrize(
    ("cells", "values"),
    [
        (["0.5", "1,234.5", "1,234"], [0.5, 1234.5, 1234.0]),
        (["0,5", "1.234,5", "1.234"], [0.5, 1234.5, 1234.0]),
        (["1 234,5", "1'234"], [1234.5, 1234.0]),
        (["0,125"], [0.125]),  # nobody writes 0 before a thousands separator
        (["-1,5e-3", "\u22122", "+3"], [-0.0015, -2.0, 3.0]),
        (["12.5 %", "3%"], [0.125, 0.03]),
        (["5e-324", "1.7976931348623157e308", "-0.0"], [5e-324, 1.7976931348623157e308, -0.0]),
        (["inf", "-Infinity", "nan", "#N/A", "", "1.5"], [np.inf, -np.inf, None, None, None, 1.5]),
        (["1.234", "5.678"], [1.234, 5.678]),  # points alone, between commas: decimal points
    ],
)
def test_numbers(cells, values):
    assert parsed(cells) == (values, [])


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=8), st.sampled_from(" .'\u202f"))
def test_any_float_survives_a_german_spreadsheet(values, mark):
    cells = [
        re.sub(r"\B(?=(\d{3})+$)", mark, repr(v).split(".")[0]) + "," + repr(v).split(".")[1]
        if "." in repr(v)
        else repr(v)
        for v in values
    ]
    found, problems = parsed([*cells, "0,5"], separator=";")  # one cell that reads one way only
    assert problems == [] and [repr(v) for v in found] == [repr(v) for v in (*map(float, values), 0.5)]


def test_whole_numbers():
    assert parsed(["131,072", "7", "512.0"], "Int64") == ([131072, 7, 512], [])
    assert parsed(["131.072", "7"], "Int64") == ([131072, 7], [])
    found, problems = parsed(["1.5", "2", "1e999999999"], "Int64")
    assert found == [None, 2, None]
    assert "line 2, column 'x': found '1.5', which is not a number, expected a whole number" in problems[0]
    assert len(problems) == 2


@pytest.mark.parametrize(
    ("cells", "separator", "message"),
    [
        (["1,234", "5,678"], ",", r"line 2, column 'x': found '1,234', which may be 1234.0 or 1.234"),
        (["1.234"], ";", r"found '1.234', which may be 1.234 or 1234.0"),
        (["0.5", "0.25", "0,5"], ",", r"line 4.*found '0,5', a decimal comma, expected a decimal point, as in line 2"),
        (["0,5", "0,25", "0.5"], ";", r"line 4.*found '0.5', a decimal point, expected a decimal comma, as in line 2"),
        (["0.5", "#DIV/0!"], ",", r"line 3.*found '#DIV/0!', a spreadsheet's own error, expected a number"),
        (["0.5", "3. Feb"], ",", r"found '3. Feb', which is not a number"),
        (["1,23,456"], ",", r"which is not a number"),
    ],
)
def test_cells_without_one_meaning_are_named(cells, separator, message):
    _, problems = parsed(cells, separator=separator)
    assert len(problems) == 1 and re.search(message, problems[0]), problems


def put(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "theirs.csv"
    path.write_text(text)
    return path


THEIRS = "Layer name;MSE;cos;comment\ntransformer_blocks.0.attn1.to_q;0,004;-0,7;fine\nblk1.v;0,001;-0,6;\n"
MAP = {"layer": "Layer name", "rel_mse": "MSE", "error_output_cosine": "cos"}


def test_import_as_far_as_it_goes(tmp_path):
    made = foreign.import_table(put(tmp_path, THEIRS), MAP, {"variant": "shipped"})
    frame = made.frame
    assert frame["layer"].tolist() == ["transformer_blocks.0.attn1.to_q", "blk1.v"]
    assert frame["rel_mse"].tolist() == [0.004, 0.001]
    assert frame[["variant", "reference", "tokens"]].iloc[0].tolist() == ["shipped", "bf16", "all"]
    assert frame[["block", "attention", "projection"]].iloc[0].tolist() == [0, "self", "q"]  # by a preset
    assert frame[["block", "attention", "projection"]].iloc[1].tolist() == [-1, "", ""]
    assert frame["shrinkage"].iloc[0] == pytest.approx(0.7 * 0.004**0.5)
    assert frame["residual_rel_mse"].iloc[0] == pytest.approx(0.004 * (1 - 0.49))
    assert frame["sqnr_db"].iloc[0] == pytest.approx(-10 * np.log10(0.004))
    assert frame[schema.SUM_NAMES].isna().to_numpy().all()  # never 0
    notes = " ".join(made.notes)
    for said in ("reference is taken to be 'bf16'", "not used: comment", "derived: sqnr_db", "decimal commas"):
        assert said in notes
    schema.write_per_layer(frame, tmp_path / "out.csv")
    pd.testing.assert_frame_equal(schema.read_per_layer(tmp_path / "out.csv"), frame, check_exact=True)
    assert made.info["imported"]["file"] == "theirs.csv"
    assert made.info["run_id"] == frame["run_id"].iloc[0]


def test_import_from_decibels_and_with_own_names(tmp_path):
    path = put(tmp_path, "layer,variant,sqnr_db\na,fixed,20\nb,fixed,30\n")
    made = foreign.import_table(path)
    assert made.frame["rel_mse"].tolist() == pytest.approx([0.01, 0.001])
    assert made.frame["error_output_cosine"].isna().all()


def test_import_fills_metrics_from_sums(tmp_path):
    table = summary.summarize(make_calls(2, 3), "w").drop(columns=[c.name for c in schema.METRICS])
    table.to_csv(tmp_path / "sums.csv", index=False)
    made = foreign.import_table(tmp_path / "sums.csv")
    want = summary.summarize(make_calls(2, 3), "w")
    pd.testing.assert_frame_equal(made.frame.drop(columns="run_id"), want.drop(columns="run_id"))


def test_layers_are_renamed_and_labelled(tmp_path):
    path = put(tmp_path, "layer,variant,rel_mse\nh.3.attn.q,fixed,1e-3\nh.12.attn.v,fixed,2e-3\nhead,fixed,1e-3\n")
    made = foreign.import_table(path, layer_regex=r"h\.(\d+)\.attn\.(.)", layer_name=r"blocks.\1.self_attn.\2")
    assert made.frame["layer"].tolist() == ["blocks.3.self_attn.q", "blocks.12.self_attn.v", "head"]
    assert made.frame["block"].tolist() == [3, 12, -1]
    assert "1 layer name(s) left as they are, e.g. 'head'" in made.notes
    named = foreign.import_table(path, layer_regex=r"h\.(?P<block>\d+)\.attn\.(?P<projection>.)")
    assert named.frame["layer"].tolist()[0] == "h.3.attn.q"
    assert named.frame["projection"].tolist() == ["q", "v", ""]


GOOD = "layer,rel_mse\na,0.5\nb,0.25\n"
IMPORTS = {
    "unknown of ours": (GOOD, {"mse": "rel_mse"}, {}, "'mse' is no column .*did you mean 'rel_mse'"),
    "unknown of theirs": (GOOD, {"rel_mse": "MSE"}, {}, "no column 'MSE' to take rel_mse from.*'layer', 'rel_mse'"),
    "our version": (GOOD, {}, {"schema_version": "7"}, "'schema_version' is no column"),
    "both": (GOOD, {"rel_mse": "rel_mse"}, {"rel_mse": "1"}, "rel_mse is both mapped and set"),
    "no variant": (GOOD, {}, {}, "which kernel was measured"),
    "no layer": ("name,rel_mse\na,1\n", {}, {"variant": "x"}, "which column names the layer.*'name'"),
    "nothing measured": ("layer,other\na,1\n", {}, {"variant": "x"}, "nothing measured"),
    "twice": ("layer,rel_mse\na,1\nb,2\na,3\n", {}, {"variant": "x"}, "line 4 repeats the key of line 2: layer=a"),
    "no name": ("layer,rel_mse\na,1\n,2\n", {}, {"variant": "x"}, "line 3, column 'layer': found an empty cell"),
    "no number": ("layer,rel_mse\na,good\n", {}, {"variant": "x"}, "line 2, column 'rel_mse': found 'good'"),
    "range": (
        "layer,cos\na,0.5\nb,-70\n",
        {"error_output_cosine": "cos"},
        {"variant": "x"},
        "line 3, column 'error_output_cosine': found -70.0, expected between -1 and 1; is 'cos' the right column",
    ),
    "reference": (GOOD, {}, {"variant": "x", "reference": "fp32"}, "expected one of bf16, as_run, fp64"),
}


@pytest.mark.parametrize("kind", IMPORTS)
def test_bad_imports_are_named(tmp_path, kind):
    text, mapping, constants, message = IMPORTS[kind]
    with pytest.raises(ValueError, match=message):
        foreign.import_table(put(tmp_path, text), mapping, constants)


@pytest.mark.parametrize(
    ("regex", "name", "message"),
    [
        ("(", None, "layer pattern '\\('"),
        ("x", None, "matches none of the layers, e.g. 'a'"),
        ("(.)", r"\2", "invalid group reference"),
        (None, r"\1", "needs --layer-regex"),
        (".", "same", "repeats the key of line 2"),
    ],
)
def test_bad_layer_patterns(tmp_path, regex, name, message):
    with pytest.raises(ValueError, match=message):
        foreign.import_table(put(tmp_path, GOOD), {}, {"variant": "x"}, regex, name)


def test_assignments():
    given = ["layer=Layer, full name,rel_mse=MSE", "variant = a=b"]
    assert foreign.assignments(given, "--map") == {"layer": "Layer, full name", "rel_mse": "MSE", "variant": "a=b"}
    for bad, message in (("layer", "expected COLUMN=VALUE"), ("=x", "expected"), ("a=", "expected")):
        with pytest.raises(ValueError, match=message):
            foreign.assignments([bad], "--map")
    with pytest.raises(ValueError, match="a is given twice: '1' and '2'"):
        foreign.assignments(["a=1", "a=2"], "--set")


def test_lines_count_quoted_line_breaks(tmp_path):
    cells = read_cells(put(tmp_path, 'layer,rel_mse\n"a\nb",1\n\nc,2\n'))
    assert cells.lines == [2, 5] and cells.rows[0][0] == "a\nb"
