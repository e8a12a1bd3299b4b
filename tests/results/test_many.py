"""Many runs give what plain pandas gives, and a pool that every command takes; damaged runs are refused by name."""

from __future__ import annotations

import builtins
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.results import many, pool, provenance, schema, sources, summary
from analysis.results.load import load_run
from analysis.results.sources import PER_RUN, find_runs
from analysis.results.validate import validate

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1] / "report")]
from made_up_runs import INFO, make_runs, write_run  # noqa: E402
from synthetic import make_calls  # noqa: E402


@pytest.fixture(scope="module")
def calls():
    """8 layers, 12 calls: 6 of the scene corridor, then 6 of hall; rows in order of calls, as a run leaves them."""
    frame = make_calls(8, 12).sort_values("call", kind="stable").reset_index(drop=True)
    return frame.assign(scene=np.where(frame["call"] < 6, "corridor", "hall"))


def same(one: Path, other: Path, *names: str) -> bool:
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """40 runs of 6 layers x 7 calls: several batches, the last not full."""
    root = tmp_path_factory.mktemp("many") / "a [b] * folder"  # letters that a file pattern would take for its own
    make_runs(root, 40, layers=6, calls=7)
    return root


def plain_pandas(root: Path) -> pd.DataFrame:
    return pd.concat([pd.read_parquet(path) for path in sorted(root.rglob(schema.PER_CALL))], ignore_index=True)


KEY = ["layer", "variant", "reference", "tokens"]


def test_many_runs_equal_plain_pandas(runs, tmp_path):
    merged = pool.merge_runs(find_runs([runs]), tmp_path, "shrinkage merge")
    everything = plain_pandas(runs)
    how = {name: "max" if name == "max_abs_e" else "sum" for name in schema.SUM_NAMES}
    pooled = schema.read_per_layer(tmp_path / schema.PER_LAYER).set_index(KEY).sort_index()
    want = everything.groupby(KEY).agg(how).sort_index()
    for column in schema.SUMS:
        got, wanted = (t[column.name].to_numpy(np.float64) for t in (pooled, want))
        np.testing.assert_allclose(got, wanted, rtol=0 if column.dtype == "Int64" else 1e-12, err_msg=column.name)
    assert (pooled["calls"] == 40 * 7).all() and merged.calls == 280 and merged.runs == 40
    by_run = pd.read_parquet(tmp_path / PER_RUN).set_index(["run_id", *KEY]).sort_index()
    want = everything.groupby(["run_id", *KEY]).agg(how).sort_index()
    got, wanted = (t[schema.SUM_NAMES].to_numpy(np.float64) for t in (by_run, want))
    np.testing.assert_allclose(got, wanted, rtol=1e-13)
    assert merged.notes == []


def test_stacked_rows_are_those_of_each_run(runs, tmp_path):
    pool.merge_runs(find_runs([runs]), tmp_path)
    stacked = schema.conform(pd.read_parquet(tmp_path / PER_RUN), schema.PER_LAYER_COLUMNS, "stacked")
    folders = sources.run_folders(runs)
    assert [f.name for f in folders[:3]] == ["run-0", "run-1", "run-2"] and len(folders) == 40
    assert stacked["run_id"].unique().tolist() == [load_run(f).info["run_id"] for f in folders]
    one = load_run(folders[17])
    rows = stacked[stacked["run_id"] == one.info["run_id"]].reset_index(drop=True)
    pd.testing.assert_frame_equal(rows, one.per_layer.sort_values(many._ORDER).reset_index(drop=True), rtol=1e-12)
    heads = pd.read_csv(tmp_path / pool.RUNS)
    want = summary.headline(one.per_layer)
    got = heads[heads["run_id"] == one.info["run_id"]]
    for name in want.columns.drop(["run_id", "variant", "reference", "tokens"]):
        np.testing.assert_allclose(got[name], want[name], rtol=1e-12, atol=1e-15, err_msg=name)
    assert got["folder"].tolist() == ["run-17"] * 2 and got["seed"].tolist() == [17] * 2


def test_the_pool_is_a_run_for_every_command(runs, tmp_path):
    pool.merge_runs(find_runs([runs]), tmp_path, "shrinkage merge x")
    run = load_run(tmp_path)
    assert run.info["merged"] == {"as": "runs", "runs": 40, "intervals": "over runs", "table": "runs.csv"}
    assert run.info["command"] == "shrinkage merge x" and "seed" not in run.info
    assert [str(p) for c in validate(tmp_path) for p in c.problems] == []
    assert (run.per_layer["rel_mse_lo"] < run.per_layer["rel_mse"]).all()
    assert (run.per_layer["rel_mse"] < run.per_layer["rel_mse_hi"]).all()
    with pytest.raises(ValueError, match="it was merged from several runs; merge those again, with the new ones"):
        find_runs([tmp_path])


def test_intervals_are_over_runs(runs, tmp_path):
    """One layer by hand: runs drawn with replacement, sums of the drawn runs, the metric of those."""
    pool.merge_runs(find_runs([runs]), tmp_path)
    stacked = pd.read_parquet(tmp_path / PER_RUN)
    rows = stacked[(stacked["layer"] == "blocks.0.self_attn.v") & (stacked["variant"] == "shipped")]
    weights = summary.bootstrap_weights(40)
    low, high = summary.percentile_interval((weights @ rows["sum_ee"]) / (weights @ rows["sum_yy"]))
    pooled = schema.read_per_layer(tmp_path / schema.PER_LAYER).set_index(["layer", "variant"])
    got = pooled.loc[("blocks.0.self_attn.v", "shipped"), ["rel_mse_lo", "rel_mse_hi"]]
    np.testing.assert_allclose(got.to_numpy(float), [low, high], rtol=1e-12)


def test_a_merge_repeats_byte_for_byte_whatever_the_workers(runs, tmp_path, monkeypatch):
    for name, workers in (("one", 1), ("three", 3)):
        stream = many.stream
        monkeypatch.setattr(many, "stream", lambda r, f=None, s=stream, w=workers: s(r, f, w))
        pool.merge_runs(find_runs([runs]), tmp_path / name)
        monkeypatch.setattr(many, "stream", stream)
    assert same(tmp_path / "one", tmp_path / "three", schema.PER_LAYER, PER_RUN, pool.RUNS, schema.RUN)


def test_two_runs_have_no_interval_and_say_so(runs, tmp_path):
    merged = pool.merge_runs(find_runs([runs / "run-0", runs / "run-1"]), tmp_path)
    assert merged.notes == ["fewer than 3 runs: no intervals in per_layer.csv"]
    assert merged.per_layer["rel_mse_lo"].isna().all()


def test_parts_within_many_runs(calls, tmp_path):
    """A folder of runs of which one came in two parts, and one lacks its per_layer.csv."""
    for seed in range(3):
        info = INFO | {"seed": seed}
        mine = calls.assign(run_id=provenance.run_id(info))
        if seed == 1:
            write_run(tmp_path / "runs" / "1a", mine[mine["call"] < 4], seed=seed)
            write_run(tmp_path / "runs" / "1b", mine[mine["call"] >= 4], seed=seed)
        else:
            write_run(tmp_path / "runs" / str(seed), mine, seed=seed)
    (tmp_path / "runs" / "2" / schema.PER_LAYER).unlink()
    merged = pool.merge_runs(find_runs([tmp_path / "runs"]), tmp_path / "out")
    assert merged.runs == 3 and merged.calls == 36
    one = summary.summarize(calls, "synthetic").set_index(KEY).sort_index()
    pooled = merged.per_layer.set_index(KEY).sort_index()
    np.testing.assert_allclose(pooled["sum_ee"], 3 * one["sum_ee"], rtol=1e-13)
    stacked = pd.read_parquet(tmp_path / "out" / PER_RUN)
    with_intervals = stacked.groupby("run_id", sort=False)["rel_mse_lo"].agg(lambda lo: lo.notna().all()).tolist()
    assert with_intervals == [True, True, False]


def test_what_differs_is_noted(calls, tmp_path):
    write_run(tmp_path / "0", calls, seed=0)
    write_run(tmp_path / "1", calls, seed=1, device="NVIDIA H200", complete=False)
    write_run(tmp_path / "2", calls[calls["layer"] != "blocks.0.self_attn.k"], seed=2)
    notes = pool.merge_runs(find_runs([tmp_path]), tmp_path / "out").notes
    assert notes[0] == "device differs: NVIDIA H200, cpu"
    assert notes[1].startswith("1 run(s) are marked incomplete, e.g. ") and notes[1].endswith("1")
    assert notes[2] == "2 layer(s) and kernel(s) are not in every run, e.g. blocks.0.self_attn.k, fixed: in 2 of 3"


def spoil_calls(change):
    def spoil(run: Path) -> None:
        frame = change(pd.read_parquet(run / schema.PER_CALL))
        frame.to_parquet(run / schema.PER_CALL, index=False)

    return spoil


def spoil_header(run: Path) -> None:
    path = run / schema.PER_LAYER
    path.write_text(path.read_text().replace("schema_version,world", "world,schema_version", 1))


def spoil_cell(run: Path) -> None:
    lines = (run / schema.PER_LAYER).read_text().splitlines()
    lines[4] = lines[4].rpartition(",")[0] + ",high"  # the upper end of an interval
    (run / schema.PER_LAYER).write_text("\n".join(lines) + "\n")


def spoil_sum(run: Path) -> None:
    table = schema.read_per_layer(run / schema.PER_LAYER)
    table.loc[3, "sum_ee"] *= 1.01
    schema.write_per_layer(table, run / schema.PER_LAYER)


SPOILED = {
    "repeated": (spoil_calls(lambda f: pd.concat([f, f.iloc[[5]]])), "repeats a call; see `shrinkage validate"),
    "empty sum": (spoil_calls(lambda f: f.assign(sum_ee=f["sum_ee"].where(f.index != 3))), "has calls with empty sums"),
    "other run": (spoil_calls(lambda f: f.assign(run_id="f" * 12)), "has no row of run '.*', which its run.json names"),
    "mixed runs": (
        spoil_calls(lambda f: f.assign(run_id=f["run_id"].where(f.index != 3, "f" * 12))),
        "belongs to a run that no run.json here names",
    ),
    "two shapes": (
        spoil_calls(lambda f: f.assign(in_features=f["in_features"].where(f.index != 3, 64))),
        "appears with two shapes or places",
    ),
    "other columns": (spoil_calls(lambda f: f.drop(columns="sum_ee")), "missing column.s. sum_ee"),
    "no table": (lambda run: (run / schema.PER_CALL).write_text("text"), "is not a Parquet file"),
    "stale per_layer": (spoil_sum, "is not what per_layer.csv says"),
    "header": (spoil_header, "is not as this toolkit writes it"),
    "cell": (spoil_cell, "cannot add up .*run-0"),
    "no run.json": (lambda run: (run / schema.RUN).unlink(), "no run.json, so nothing says what its tables measured"),
    "no run_id": (lambda run: (run / schema.RUN).write_text('{"schema_version": 1}'), "no run_id"),
    "no calls": (lambda run: (run / schema.PER_CALL).unlink(), "no per_call.parquet: sums per call are what merging"),
}


@pytest.mark.parametrize("kind", SPOILED)
def test_damaged_runs_are_refused_by_name(runs, tmp_path, kind):
    for name in ("run-0", "run-1"):
        shutil.copytree(runs / name, tmp_path / "runs" / name)
    spoil, message = SPOILED[kind]
    spoil(tmp_path / "runs" / "run-0")
    with pytest.raises(ValueError, match=message) as stop:
        pool.merge_runs(find_runs([tmp_path / "runs"]), tmp_path / "out")
    assert "run-0" in str(stop.value)
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())


def test_folders_without_runs(tmp_path):
    with pytest.raises(ValueError, match="does not exist; name a run's folder"):
        find_runs([tmp_path / "none"])
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file; name a run's folder"):
        find_runs([tmp_path / "file"])
    with pytest.raises(ValueError, match="no run in this folder or below it"):
        find_runs([tmp_path])
    schema.write_run({"schema_version": 1, "run_id": "0" * 12, "calls": 0}, tmp_path / "idle" / schema.RUN)
    with pytest.raises(ValueError, match="nothing was measured in"):
        find_runs([tmp_path / "idle"])


def test_what_lies_below_a_run_is_part_of_it(runs, tmp_path):
    shutil.copytree(runs / "run-0", tmp_path / "launch")
    shutil.copytree(runs / "run-1", tmp_path / "launch" / "rank-1")
    shutil.copytree(runs / "run-1", tmp_path / ".hidden" / "run")
    assert sources.run_folders(tmp_path) == [tmp_path / "launch"]


def test_without_duckdb_the_message_says_what_to_install(runs, tmp_path, monkeypatch):
    real = builtins.__import__

    def no_duckdb(name, *arguments, **options):
        if name == "duckdb":
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", no_duckdb)
    with pytest.raises(ValueError, match=r"not installed: pip install 'int8-shrinkage\[many\]'"):
        pool.merge_runs(find_runs([runs]), tmp_path)


def test_made_up_runs_are_sound(runs):
    found = validate(runs / "run-3")
    problems = [str(p) for c in found for p in c.problems if "_lo'" not in str(p) and "_hi'" not in str(p)]
    assert problems == []  # but for the intervals, which are made up
    assert json.loads((runs / "run-3" / schema.RUN).read_text())["seed"] == 3


def test_a_pool_that_its_runs_do_not_add_up_to_is_named(runs, tmp_path):
    pool.merge_runs(find_runs([runs]), tmp_path, "shrinkage merge")
    assert not [problem for checked in validate(tmp_path) for problem in checked.problems]
    table = schema.read_per_layer(tmp_path / schema.PER_LAYER)
    table.loc[3, "calls"] += 1
    table.to_csv(tmp_path / schema.PER_LAYER, index=False)
    problems = [str(problem) for checked in validate(tmp_path) for problem in checked.problems]
    assert len(problems) == 1 and "line 5" in problems[0] and f"which {PER_RUN} adds up to" in problems[0]
