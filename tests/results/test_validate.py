"""Sound tables pass; every check finds the one fault that is planted for it and names its place and values."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.results import checks, folder, foreign, provenance, schema, sources, summary
from analysis.results.validate import validate

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "report"))
from synthetic import make_calls

INFO = {
    "world": "synthetic",
    "scenes": ["corridor"],
    "seed": 0,
    "variants": {"shipped": "cd" * 32, "fixed": "ef" * 32},
    "reference": "bf16",
    "tokens": "all",
    "complete": True,
    "layers_silent": [],
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "sound"
    folder.write_run_folder(out, make_calls(4, 4, run_id=provenance.run_id(INFO)), INFO)
    return out


@pytest.fixture
def run(sound, tmp_path):
    return Path(shutil.copytree(sound, tmp_path / "run"))


def problems(path: Path) -> list[str]:
    return [str(problem) for checked in validate(path) for problem in checked.problems]


def test_a_sound_run_has_no_problem(sound):
    found = validate(sound)
    assert [checked.kind for checked in found] == [schema.RUN, schema.PER_LAYER, schema.PER_CALL]
    assert problems(sound) == []
    assert [note for checked in found for note in checked.notes] == []
    for name in schema.PER_LAYER, schema.PER_CALL, schema.RUN:
        assert problems(sound / name) == []
    assert problems(sound.parent) == []  # a folder of runs


# column -> (what is written into line 4, what is said of it)
CELLS = {
    "layer": ("", "found an empty cell, expected a name"),
    "variant": ("", "found an empty cell, expected a name"),
    "run_id": ("1.23457E+11", "found '1.23457E.11', expected 12 hex digits"),
    "reference": ("fp8", "found 'fp8', expected one of bf16, as_run, fp64"),
    "tokens": ("some", "found 'some', expected one of all, valid"),
    "block": (-2, "found -2, expected at least -1"),
    "in_features": (0, "found 0, expected at least 1"),
    "calls": (0, "found 0, expected at least 1"),
    "rows": (-5, "found -5, expected at least 0"),
    "zero_rows": (10**9, "found 1000000000, expected at most 2048 = rows"),
    "mismatched": (10**12, "expected at most 524288 = rows . in_features"),
    "zeroed": (-1, "found -1, expected at least 0"),
    "sum_yy": (-1.0, "found -1.0, expected at least 0"),
    "sum_ee": (np.inf, "found inf, expected a finite sum"),
    "sum_ey": (-1e9, "expected a size of at most .* = sqrt.sum_ee . sum_yy."),
    "sum_ez": (1e9, "expected a size of at most .* = sqrt.sum_ee . sum_zz."),
    "sum_magnitude_error": (-1e9, "= sqrt.rows . in_features . sum_square_error."),
    "max_abs_e": (1e9, "expected at most .* = sqrt.sum_ee."),
    "sum_crest": (1.0, "expected at least 2040, the rows that are not zero"),
    "sum_eff_ee": (None, "found an empty cell, expected a number: the row has other sums"),
    "rel_mse": (0.5, "found 0.5, expected 0.00.* from the sums .sum_ee / sum_yy."),
    "error_output_cosine": (-1.5, "found -1.5, expected between -1 and 1"),
    "code_mismatch": (1.5, "found 1.5, expected between 0 and 1"),
    "crest": (0.5, "found 0.5, expected at least 1"),
    "shrinkage": (None, "found an empty cell, expected .* from the sums"),
    "residual_rel_mse": (0.1, "from the sums .rel_mse . .1 - cosine.2."),
    "sqnr_db": (30.1, "found 30.1, expected .* from the sums"),
    "rel_mse_lo": (9.0, "found 9.0, expected at most .* the upper end"),
    "shrinkage_hi": (None, "found an empty cell, expected a number: the lower end has one"),
    "error_output_cosine_lo": (-1.2, "found -1.2, expected between -1 and 1"),
}


@pytest.mark.parametrize("column", CELLS)
def test_each_check_names_its_cell(run, column):
    value, message = CELLS[column]
    table = schema.read_per_layer(run / schema.PER_LAYER)
    table.loc[2, column] = value
    schema.write_per_layer(table, run / schema.PER_LAYER)
    said = problems(run / schema.PER_LAYER)
    place = f"{run / schema.PER_LAYER}: line 4, column {column!r}: "
    assert any(line.startswith(place) and re.search(message, line) for line in said), said


@pytest.mark.parametrize("name", [c.name for c in schema.METRICS])
def test_every_metric_is_derived_again(run, name):
    """One part in 10^8 is found, one in 10^11 is not: sums are kept to 1e-6, but metrics follow from them exactly."""
    table = schema.read_per_layer(run / schema.PER_LAYER)
    shift = 1e-8 * table["rel_mse"] if name == "residual_rel_mse" else 1e-8 * table[name].abs()
    for factor, wrong in ((1, True), (1e-3, False)):
        changed = table.assign(**{name: table[name] + factor * shift})
        schema.write_per_layer(changed, run / "changed.csv")
        said = problems(run / "changed.csv")
        nothing_to_find = (shift == 0).all() or table[name].abs().max() < 1e-12
        assert bool(said) == (wrong and not nothing_to_find), (factor, said)


def test_the_sums_themselves_pass_at_their_bounds():
    """Error exactly against the output: cosine -1, and every inequality an equality."""
    calls = make_calls(2, 3)
    calls["sum_ey"] = -np.sqrt(calls["sum_ee"] * calls["sum_yy"])
    calls["sum_ez"] = -np.sqrt(calls["sum_ee"] * calls["sum_zz"])
    calls["sum_crest"] = (calls["rows"] - calls["zero_rows"]).astype(float)
    calls["max_abs_e"] = np.sqrt(calls["sum_ee"])
    assert checks.check_rows(calls, "f", [f"row {at}" for at in range(len(calls))]) == []


def test_zero_and_empty_cells_are_sound(tmp_path):
    calls = make_calls(2, 3)
    first = calls["layer"] == calls["layer"].iloc[0]
    for name in schema.SUM_NAMES:  # a layer that saw nothing but NaN rows
        calls.loc[first, name] = 0
    calls.loc[first, "nonfinite_rows"] = 512
    schema.write_per_layer(summary.summarize(calls, "w"), tmp_path / "t.csv")
    assert problems(tmp_path / "t.csv") == []


def test_duplicate_keys_name_both_lines(run):
    lines = (run / schema.PER_LAYER).read_text().splitlines()
    (run / schema.PER_LAYER).write_text("\n".join([*lines, lines[2]]) + "\n")
    assert f"line {len(lines) + 1}, column 'layer': found " in problems(run / schema.PER_LAYER)[0]
    assert "expected one row a key; line 3 has the same" in problems(run / schema.PER_LAYER)[0]


def test_many_like_problems_are_counted(run):
    table = summary.summarize(make_calls(30, 3), "synthetic")
    schema.write_per_layer(table.assign(rel_mse=0.5), run / schema.PER_LAYER)
    said = [line for line in problems(run / schema.PER_LAYER) if "'rel_mse'" in line]
    assert len(said) == checks.SHOWN + 1
    assert f"found {60 - checks.SHOWN} more such cells" in said[-1]


def test_missing_and_other_columns(run):
    table = pd.read_csv(run / schema.PER_LAYER, dtype=str, keep_default_na=False)
    table.drop(columns="sum_ee").assign(extra=1).to_csv(run / schema.PER_LAYER, index=False)
    checked = validate(run / schema.PER_LAYER)[0]
    assert [str(p).split(": ", 1)[1] for p in checked.problems] == [
        "column 'sum_ee': found no such column, expected every column of data/README.md"
    ]
    assert checked.notes == ["column(s) ignored: extra"]


def test_a_cell_that_is_no_number_is_one_problem(run):
    lines = (run / schema.PER_LAYER).read_text().splitlines()
    at = lines[0].split(",").index("sum_ee")
    cells = lines[3].split(",")
    cells[at] = "#REF!"
    lines[3] = ",".join(cells)
    (run / schema.PER_LAYER).write_text("\n".join(lines) + "\n")
    (said,) = problems(run / schema.PER_LAYER)
    assert "line 4, column 'sum_ee': found '#REF!', a spreadsheet's own error" in said


def test_a_spreadsheet_is_told_and_is_no_problem(run):
    text = (run / schema.PER_LAYER).read_text()
    (run / schema.PER_LAYER).write_bytes(("\ufeff" + text.replace(",", ";").replace("\n", "\r\n")).encode())
    checked = validate(run)[1]
    assert checked.problems == []
    assert checked.notes == ["a byte order mark", "CRLF line ends", "semicolon as separator"]


def test_imported_rows_without_sums_pass_with_a_note(tmp_path):
    (tmp_path / "theirs.csv").write_text("layer,rel_mse\na,0.5\n")
    made = foreign.import_table(tmp_path / "theirs.csv", {}, {"variant": "x"})
    schema.write_per_layer(made.frame, tmp_path / "run" / schema.PER_LAYER)
    schema.write_run(made.info, tmp_path / "run" / schema.RUN)
    run, layers = validate(tmp_path / "run")
    assert run.problems == layers.problems == []
    assert layers.notes[0] == "1 row(s) without sums: their metrics cannot be derived again"


def test_calls_and_layers_contradict(run):
    calls = schema.read_per_call(run / schema.PER_CALL)
    target = (calls["layer"] == "blocks.0.self_attn.k") & (calls["variant"] == "shipped") & (calls["call"] == 2)
    calls.loc[target, "sum_ee"] *= 1.001
    schema.write_per_call(calls, run / schema.PER_CALL)
    said = problems(run)
    table = schema.read_per_layer(run / schema.PER_LAYER)
    line = table.index[(table["layer"] == "blocks.0.self_attn.k") & (table["variant"] == "shipped")][0] + 2
    assert any(f"line {line}, column 'sum_ee': found " in s and "per_call.parquet adds up to" in s for s in said), said
    assert any("column 'rel_mse_" in s for s in said)  # intervals too
    assert all(f"line {line}," in s for s in said)


def test_a_layer_on_one_side_only(run):
    calls = schema.read_per_call(run / schema.PER_CALL)
    kept = calls[calls["layer"] != "blocks.0.self_attn.k"]
    schema.write_per_call(kept, run / schema.PER_CALL)
    assert any("found 'blocks.0.self_attn.k', expected a layer and kernel that per_call" in s for s in problems(run))
    table = schema.read_per_layer(run / schema.PER_LAYER)
    schema.write_per_call(calls, run / schema.PER_CALL)
    schema.write_per_layer(table[table["layer"] != "blocks.0.self_attn.k"], run / schema.PER_LAYER)
    assert any("found no row, expected one for run_id=" in s and "self_attn.k" in s for s in problems(run))


CALLS = {
    "repeated": (lambda f: pd.concat([f, f.iloc[[3]]]), "row 32, column 'layer'.*row 3 has the same"),
    "scene": (
        lambda f: f.assign(scene=f["scene"].where(f.index != 5, "hall")),
        "'scene': found 'hall', expected 'corr",
    ),
    "shape": (
        lambda f: f.assign(in_features=f["in_features"].where(f.index != 5, 64)),
        "'in_features': found 64, expected 256 as in the first row of this layer",
    ),
    "empty": (
        lambda f: f.assign(sum_ee=f["sum_ee"].where(f.index != 5)),
        "row 5, column 'sum_ee': found an empty cell",
    ),
    "negative": (lambda f: f.assign(call=f["call"] - 1), "'call': found -1, expected at least 0"),
}


@pytest.mark.parametrize("kind", CALLS)
def test_per_call_is_checked_by_row(run, kind):
    change, message = CALLS[kind]
    frame = change(schema.read_per_call(run / schema.PER_CALL))
    schema.write_per_call(frame.reset_index(drop=True), run / schema.PER_CALL)
    said = problems(run / schema.PER_CALL)
    assert any(re.search(message, line) for line in said), said


INFOS = {
    "run_id": ({"run_id": "0" * 12}, "column 'run_id': found '000000000000', expected .* the hash of this provenance"),
    "edited": ({"seed": 1}, "the hash of this provenance: it was edited"),
    "world": ({"world": "other"}, "per_layer.csv: line 2, column 'world': found 'synthetic', expected 'other', as"),
    "tokens": ({"tokens": "valid"}, "line 2, column 'tokens': found 'all', expected 'valid', as .*run.json says"),
    "variants": ({"variants": {"fixed": ""}}, "line 3, column 'variant': found 'shipped', expected 'fixed'"),
    "calls": ({"calls": 7}, "column 'calls': found 7, expected 4, which per_call.parquet adds up to"),
    "rows": ({"rows": 1}, "column 'rows': found 1, expected"),
    "silent": ({"layers_silent": ["blocks.0.self_attn.q"]}, "column 'layers_silent': found 'blocks.0.self_attn.q'"),
    "version": ({"schema_version": 9}, "schema version 9, this toolkit reads 1"),
}


@pytest.mark.parametrize("kind", INFOS)
def test_run_json_is_held_against_the_tables(run, kind):
    change, message = INFOS[kind]
    info = json.loads((run / schema.RUN).read_text()) | change
    (run / schema.RUN).write_text(json.dumps(info))
    said = problems(run)
    assert any(re.search(message, line) for line in said), said


def test_files_that_are_not_there_or_no_tables(run, tmp_path):
    (run / schema.RUN).unlink()
    assert any("run.json" in line and "does not exist" in line for line in problems(run))
    (tmp_path / "empty").mkdir()
    assert "found no run in it, expected a run's folder" in problems(tmp_path / "empty")[0]
    assert "does not exist" in problems(tmp_path / "none.csv")[0]
    (tmp_path / "text.parquet").write_text("text")
    assert "expected a table that can be read" in problems(tmp_path / "text.parquet")[0]
    (run / schema.PER_LAYER).write_text("")
    assert any("is empty" in line for line in problems(run))


def test_what_is_allowed_is_noted(run):
    info = json.loads((run / schema.RUN).read_text()) | {"complete": False}
    (run / schema.RUN).write_text(json.dumps(info))
    (run / schema.PER_CALL).unlink()
    assert problems(run) == []
    notes = [note for checked in validate(run) for note in checked.notes]
    assert notes == [
        "the run is marked incomplete",
        "no per_call.parquet beside it: its sums cannot be added again",
    ]


def test_a_run_that_measured_nothing(tmp_path):
    schema.write_run(
        {"schema_version": 1, "calls": 0, "run_id": "0" * 12, "world": "w", "merged": {}}, tmp_path / "run.json"
    )
    assert problems(tmp_path) == []


def test_stacked_runs_are_checked(run):
    frame = schema.read_per_layer(run / schema.PER_LAYER)
    frame.to_parquet(run / sources.PER_RUN, index=False)
    assert problems(run / sources.PER_RUN) == []
    frame.assign(rel_mse=frame["rel_mse"] * 2).to_parquet(run / sources.PER_RUN, index=False)
    assert "row 0, column 'rel_mse'" in problems(run / sources.PER_RUN)[0]
