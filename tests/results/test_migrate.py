"""Files of an earlier schema version read under the present one; other versions are refused by name."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pandas as pd
import pytest

from analysis.results import foreign, many, migrate, pool, schema, sources

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "report"))
from synthetic import make_run


def from_0(kind, data):
    """The step that a version 0 with another name for rel_mse, another unit and no zero_rows would need."""
    if kind == "run":
        return {("world" if key == "model" else key): value for key, value in data.items()}
    if kind == "per_call":
        return data.rename(columns={"sum_e2": "sum_ee"}).assign(zero_rows=0)
    return data.rename(columns={"sum_e2": "sum_ee", "mse": "rel_mse"}).assign(zero_rows="0")


def as_version_0(run: Path) -> Path:
    """A run's folder as that version would have left it."""
    table = pd.read_csv(run / schema.PER_LAYER, dtype=str, keep_default_na=False)
    table = table.rename(columns={"sum_ee": "sum_e2", "rel_mse": "mse"}).drop(columns="zero_rows")
    table.assign(schema_version=0).to_csv(run / schema.PER_LAYER, index=False)
    calls = pd.read_parquet(run / schema.PER_CALL).rename(columns={"sum_ee": "sum_e2"}).drop(columns="zero_rows")
    calls.assign(schema_version=0).to_parquet(run / schema.PER_CALL, index=False)
    info = json.loads((run / schema.RUN).read_text())
    info = {("model" if key == "world" else key): value for key, value in info.items()} | {"schema_version": 0}
    (run / schema.RUN).write_text(json.dumps(info))
    return run


@pytest.fixture
def step(monkeypatch):
    monkeypatch.setitem(migrate.STEPS, 0, from_0)


def test_version_0_reads_as_the_present_one(tmp_path, step):
    now = make_run(tmp_path / "now", 2, 3)
    old = as_version_0(make_run(tmp_path / "old", 2, 3))
    want = schema.read_per_layer(now / schema.PER_LAYER).assign(zero_rows=0)
    for read in (schema.read_per_layer, lambda path: foreign.read_table(path).frame):
        pd.testing.assert_frame_equal(read(old / schema.PER_LAYER), want, check_dtype=False, check_exact=True)
    calls = schema.read_per_call(old / schema.PER_CALL)
    pd.testing.assert_frame_equal(
        calls, schema.read_per_call(now / schema.PER_CALL).assign(zero_rows=0), check_dtype=False, check_exact=True
    )
    assert schema.read_run(old / schema.RUN)["world"] == "synthetic"
    assert schema.read_run(old / schema.RUN)["schema_version"] == schema.SCHEMA_VERSION


def test_versions_may_be_mixed_between_runs_that_are_merged(tmp_path, step):
    make_run(tmp_path / "runs" / "now", 2, 3, run_id="0" * 12)
    as_version_0(make_run(tmp_path / "runs" / "old", 2, 3, run_id="1" * 12))
    runs = sources.find_runs([tmp_path / "runs"])
    assert [many._is_plain(run) for run in runs] == [True, False]
    merged = pool.merge_runs(runs, tmp_path / "out")
    one = schema.read_per_layer(tmp_path / "runs" / "now" / schema.PER_LAYER)
    assert merged.per_layer["sum_ee"].tolist() == (2 * one["sum_ee"]).tolist()


def test_without_a_step_the_version_is_refused(tmp_path):
    old = as_version_0(make_run(tmp_path / "old", 2, 3))
    for read, name in (
        (schema.read_per_layer, schema.PER_LAYER),
        (schema.read_per_call, schema.PER_CALL),
        (schema.read_run, schema.RUN),
        (foreign.read_table, schema.PER_LAYER),
    ):
        with pytest.raises(ValueError, match="schema version 0, this toolkit reads 1 and cannot migrate 0 to 1"):
            read(old / name)


def test_same_columns_of_another_version_are_not_added_as_they_are(tmp_path):
    run = make_run(tmp_path / "run", 2, 3)
    calls = pd.read_parquet(run / schema.PER_CALL)
    calls.assign(schema_version=0).to_parquet(run / schema.PER_CALL, index=False)
    with pytest.raises(ValueError, match="cannot migrate 0 to 1"):
        list(many.stream(sources.find_runs([run])))


@pytest.mark.parametrize(
    ("version", "message"), [(2, "upgrade the toolkit"), ("one", "is this a table of this toolkit"), (None, "None")]
)
def test_other_versions(version, message):
    with pytest.raises(ValueError, match=message):
        migrate.upgrade("run", {}, version, 1, "run.json")


def test_mixed_versions_in_one_file_are_named(tmp_path, step):
    run = make_run(tmp_path / "run", 2, 3)
    lines = (run / schema.PER_LAYER).read_text().splitlines()
    lines[3] = "0" + lines[3][1:]
    (run / schema.PER_LAYER).write_text("\n".join(lines) + "\n")
    for read in (schema.read_per_layer, foreign.read_table):
        with pytest.raises(ValueError, match="mixed schema versions: line 4 has 0, the first row 1"):
            read(run / schema.PER_LAYER)
    calls = pd.read_parquet(run / schema.PER_CALL)
    calls.loc[5, "schema_version"] = 0
    calls.to_parquet(run / schema.PER_CALL, index=False)
    with pytest.raises(ValueError, match="mixed schema versions: row 5 has 0"):
        schema.read_per_call(run / schema.PER_CALL)
