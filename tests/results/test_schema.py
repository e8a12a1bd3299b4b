"""Tables read back as they were written, and a broken one is refused with its place named."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.results import schema, summary

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "report"))
from synthetic import make_calls, make_run  # noqa: E402


@pytest.fixture
def table():
    return summary.summarize(make_calls(4, 3), "synthetic, with a comma")


@pytest.fixture
def csv(table, tmp_path):
    path = tmp_path / schema.PER_LAYER
    schema.write_per_layer(table, path)
    return path


def cells(path: Path) -> list[list[str]]:
    """Rows of a CSV whose cells hold no separator."""
    return [line.split(",") for line in path.read_text().splitlines()]


def put(path: Path, rows: list[list[str]]) -> None:
    path.write_text("\n".join(",".join(row) for row in rows) + "\n")


@pytest.fixture
def plain(tmp_path):
    """A per_layer.csv that `cells` can read."""
    path = tmp_path / "plain" / schema.PER_LAYER
    schema.write_per_layer(summary.summarize(make_calls(4, 3), "synthetic"), path)
    return path


def test_per_layer_reads_back_bit_equal(table, tmp_path):
    awkward = [0.1 + 0.2, 1 / 3, 5e-324, 1.7976931348623157e308, np.inf, np.nan, -0.0, 1e22]
    table["rel_mse"] = awkward
    schema.write_per_layer(table, tmp_path / "t.csv")
    back = schema.read_per_layer(tmp_path / "t.csv")
    pd.testing.assert_frame_equal(back, table, check_exact=True)
    numbers = [c.name for c in schema.PER_LAYER_COLUMNS if c.dtype == "float64"]
    assert back[numbers].to_numpy().tobytes() == table[numbers].to_numpy().tobytes()


def test_writing_twice_gives_the_same_bytes(csv, tmp_path):
    schema.write_per_layer(schema.read_per_layer(csv), tmp_path / "again.csv")
    assert (tmp_path / "again.csv").read_bytes() == csv.read_bytes()


def test_names_survive(tmp_path):
    odd = 'a "quoted", name\twith µ and NA'
    table = summary.summarize(make_calls(1, 1), "NA")
    table["layer"] = pd.array([odd] * len(table), dtype="string")
    schema.write_per_layer(table, tmp_path / "t.csv")
    back = schema.read_per_layer(tmp_path / "t.csv")
    assert (back["layer"] == odd).all()
    assert (back["world"] == "NA").all()


def test_per_call_reads_back_equal(tmp_path):
    calls = make_calls(3, 2)
    schema.write_per_call(calls, tmp_path / schema.PER_CALL)
    pd.testing.assert_frame_equal(schema.read_per_call(tmp_path / schema.PER_CALL), calls, check_exact=True)


def test_unlabelled_layers_read_back(tmp_path):
    table = summary.summarize(make_calls(3, 1, labelled=False), "w")
    schema.write_per_layer(table, tmp_path / "t.csv")
    pd.testing.assert_frame_equal(schema.read_per_layer(tmp_path / "t.csv"), table, check_exact=True)


def test_wrong_version(plain):
    rows = cells(plain)
    for row in rows[1:]:
        row[0] = "99"
    put(plain, rows)
    with pytest.raises(ValueError, match="schema version 99, this toolkit reads 1"):
        schema.read_per_layer(plain)


def test_wrong_version_of_run_and_calls(tmp_path):
    run = make_run(tmp_path / "run", 1, 1, info={"schema_version": 7})
    with pytest.raises(ValueError, match="schema version 7"):
        schema.read_run(run / schema.RUN)
    calls = make_calls(1, 1).assign(schema_version=7)
    schema.write_per_call(calls, run / schema.PER_CALL)
    with pytest.raises(ValueError, match="schema version 7"):
        schema.read_per_call(run / schema.PER_CALL)


def test_missing_and_extra_column(plain, table):
    rows = cells(plain)
    place = rows[0].index("sum_ee")
    put(plain, [row[:place] + row[place + 1 :] for row in rows])
    with pytest.raises(ValueError, match=r"missing column\(s\) sum_ee; see data/README.md"):
        schema.read_per_layer(plain)
    put(plain, [[*row, "extra" if number == 0 else "1"] for number, row in enumerate(rows)])
    with pytest.raises(ValueError, match=r"unknown column\(s\) extra"):
        schema.read_per_layer(plain)
    with pytest.raises(ValueError, match=r"missing column\(s\) rel_mse"):
        schema.write_per_layer(table.drop(columns="rel_mse"), plain)


def test_duplicate_key_names_the_line(plain):
    rows = cells(plain)
    put(plain, [*rows, rows[2]])
    with pytest.raises(ValueError, match=rf"line {len(rows) + 1} repeats the key run_id=0123456789ab, layer="):
        schema.read_per_layer(plain)


@pytest.mark.parametrize(("column", "cell"), [("rel_mse", "0;5"), ("rows", "12.5"), ("calls", "many")])
def test_a_cell_that_is_no_number_is_named(plain, column, cell):
    rows = cells(plain)
    rows[3][rows[0].index(column)] = cell
    put(plain, rows)
    with pytest.raises(ValueError, match=rf"line 4, column '{column}': '{cell}' is not a number"):
        schema.read_per_layer(plain)


def test_not_a_table(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"a run's folder holds per_layer\.csv"):
        schema.read_per_layer(tmp_path / "none.csv")
    (tmp_path / "empty.csv").touch()
    with pytest.raises(ValueError, match="no column 'schema_version' or no rows"):
        schema.read_per_layer(tmp_path / "empty.csv")
    (tmp_path / "not.parquet").write_text("text")
    with pytest.raises(ValueError, match="is not a Parquet file"):
        schema.read_per_call(tmp_path / "not.parquet")
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        schema.read_run(tmp_path / "run.json")


def test_a_failed_write_leaves_the_old_file(csv):
    before = csv.read_bytes()
    with pytest.raises(RuntimeError), schema.replacing(csv) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert csv.read_bytes() == before
    assert [p.name for p in csv.parent.iterdir()] == [csv.name]


def test_column_dictionary_is_current():
    assert (ROOT / "data" / "README.md").read_text(encoding="utf-8") == schema.markdown(), (
        "data/README.md is generated: write schema.markdown() to it"
    )


def test_columns_are_unique_and_carry_units():
    for columns in (schema.PER_LAYER_COLUMNS, schema.PER_CALL_COLUMNS):
        names = [c.name for c in columns]
        assert len(names) == len(set(names))
    assert all(c.unit == "LSB" for c in schema.METRICS if c.name.endswith("_lsb"))
    assert all(c.unit == "dB" for c in schema.METRICS if c.name.endswith("_db"))
