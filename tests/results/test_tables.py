"""Study tables: read back equal, refuse what is not theirs, describe themselves."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.results import studies, tables
from analysis.results.schema import Column
from analysis.results.tables import Table

SMALL = Table(
    "small.csv",
    3,
    "one row = one thing",
    "shrinkage small",
    (
        Column("name", "string", "", "its name", "key"),
        Column("count", "Int64", "", "how many", "label"),
        Column("value", "float64", "dB", "how much | or not", "metric"),
    ),
)
ROWS = pd.DataFrame({"name": ["a", "b"], "count": [1, None], "value": [0.1 + 0.2, np.nan]})


@pytest.mark.parametrize("file", ["small.csv", "small.parquet"])
def test_a_table_reads_back_equal(tmp_path, file):
    table = Table(file, SMALL.version, SMALL.row, SMALL.command, SMALL.body)
    written = tables.write(table, ROWS, tmp_path, "abc")
    assert tables.read(table, tmp_path).equals(written)
    assert written["run_id"].tolist() == ["abc", "abc"] and written["value"][0] == 0.1 + 0.2


def test_a_missing_table(tmp_path):
    assert tables.find(SMALL, tmp_path) is None
    with pytest.raises(FileNotFoundError, match=r"small.csv does not exist; make it with `shrinkage small --out"):
        tables.read(SMALL, tmp_path)


def test_what_is_wrong_is_named(tmp_path):
    path = tmp_path / "small.csv"
    tables.write(SMALL, ROWS, tmp_path, "abc")
    good = path.read_text()
    path.write_text(good.replace("\n3,", "\n2,"))
    with pytest.raises(ValueError, match=r"small.csv: version 2, this toolkit reads 3; make it again"):
        tables.read(SMALL, tmp_path)
    path.write_text(good.replace("0.30000000000000004", "much"))
    with pytest.raises(ValueError, match=r"line 2, column 'value': 'much' is not a number"):
        tables.read(SMALL, tmp_path)
    path.write_text(good.replace(",b,", ",a,"))
    with pytest.raises(ValueError, match=r"row 3 repeats the key run_id=abc, name=a"):
        tables.read(SMALL, tmp_path)
    path.write_text(good.replace("count", "counts"))
    with pytest.raises(ValueError, match="missing column"):
        tables.read(SMALL, tmp_path)
    path.write_text("")
    with pytest.raises(ValueError, match="is not a table of this toolkit"):
        tables.read(SMALL, tmp_path)
    with pytest.raises(ValueError, match="repeats the key"):
        tables.write(SMALL, pd.concat([ROWS, ROWS]), tmp_path, "abc")


def test_provenance_and_its_hash(tmp_path):
    info = {"world": "tiny", "seeds": [0], "command": "x", "timing": {"wall_s": 1}}
    identity = tables.write_info("closed_loop", info, tmp_path)
    assert tables.read_info("closed_loop", tmp_path) == {"run_id": identity} | info
    assert tables.run_id(info | {"command": "y", "timing": {}}) == identity != tables.run_id(info | {"seeds": [1]})
    assert tables.read_info("ablation", tmp_path) == {}
    (tmp_path / "ablation.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        tables.read_info("ablation", tmp_path)


def test_the_dictionary_describes_every_column():
    text = tables.markdown((*studies.TABLES, SMALL))
    for table in studies.TABLES:
        assert f"## {table.file}" in text
        assert all(f"| `{name}` |" in text for name in table.names)
        assert table.key[0] == "run_id" and len(set(table.names)) == len(table.names)
    assert "how much \\| or not" in text


def test_the_committed_dictionary_is_the_generated_one():
    found = (Path(__file__).parents[2] / "data" / "STUDIES.md").read_text(encoding="utf-8")
    assert found == tables.markdown(studies.TABLES), "write tables.markdown(studies.TABLES) to data/STUDIES.md"
