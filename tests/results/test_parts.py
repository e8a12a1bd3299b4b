"""The parts of a run give the whole's table byte for byte; what is no part of it is refused, with the field named."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.results import folder, parts, pool, schema
from analysis.results.load import load_run
from analysis.results.sources import find_runs
from analysis.results.validate import validate

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1] / "report")]
from made_up_runs import write_run  # noqa: E402
from synthetic import make_calls  # noqa: E402


@pytest.fixture(scope="module")
def calls():
    """8 layers, 12 calls: 6 of the scene corridor, then 6 of hall; rows in order of calls, as a run leaves them."""
    frame = make_calls(8, 12).sort_values("call", kind="stable").reset_index(drop=True)
    return frame.assign(scene=np.where(frame["call"] < 6, "corridor", "hall"))


@pytest.fixture(scope="module")
def whole(calls, tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "whole", calls)


def join(*folders: Path, out: Path, **options) -> Path:
    per_call, info = parts.join(find_runs(folders), **options)
    folder.write_run_folder(out, per_call, info)
    return out


def same(one: Path, other: Path, *names: str) -> bool:
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


@pytest.mark.parametrize("turned", [False, True])
def test_halves_by_calls_give_the_whole_byte_for_byte(calls, whole, tmp_path, turned):
    for name, mask in (("first", calls["call"] < 5), ("second", calls["call"] >= 5)):
        write_run(tmp_path / name, calls[mask])
    halves = [tmp_path / "first", tmp_path / "second"]
    out = join(*(halves[::-1] if turned else halves), out=tmp_path / "out")
    assert same(out, whole, schema.PER_LAYER, schema.PER_CALL)
    assert load_run(out).info["run_id"] == load_run(whole).info["run_id"]
    assert load_run(out).info["merged"]["parts"][0]["calls"] == (7 if turned else 5)
    assert load_run(out).info["calls"] == 12
    assert [p for c in validate(out) for p in c.problems] == []


def test_interleaved_calls_give_the_whole_too(calls, whole, tmp_path):
    for rest in range(3):
        write_run(tmp_path / f"part-{rest}", calls[calls["call"] % 3 == rest])
    out = join(tmp_path, out=tmp_path / "out")
    assert same(out, whole, schema.PER_LAYER, schema.PER_CALL)


def test_halves_by_scene_give_the_whole_byte_for_byte(calls, whole, tmp_path):
    for scene in ("corridor", "hall"):
        half = calls[calls["scene"] == scene]
        half = half.assign(call=half["call"] - half["call"].min())  # each half counted its calls from 0
        write_run(tmp_path / scene, half, scenes=[scene])
    halves = [tmp_path / "corridor", tmp_path / "hall"]
    with pytest.raises(ValueError, match=r"hall: scenes is \['hall'\], .*corridor has \['corridor'\]; .*--as runs"):
        parts.join(find_runs(halves))
    out = join(*halves, out=tmp_path / "out", scenes=True)
    assert same(out, whole, schema.PER_LAYER, schema.PER_CALL)
    assert load_run(out).info["scenes"] == ["corridor", "hall"]
    assert [p for c in validate(out) for p in c.problems] == []


def ranks_of(calls: pd.DataFrame, share: float) -> list[pd.DataFrame]:
    """The rows of every call dealt to two ranks."""
    one, other = calls.copy(), calls.copy()
    for column in schema.SUMS:
        if column.name != "max_abs_e":
            one[column.name] = (calls[column.name] * share).astype(column.dtype if column.dtype != "Int64" else "int64")
            other[column.name] = calls[column.name] - one[column.name]
    other["max_abs_e"] = calls["max_abs_e"] / 2
    return [one, other]


@pytest.mark.parametrize("stated", [True, False])
def test_ranks_add_up(calls, whole, tmp_path, stated):
    for number, frame in enumerate(ranks_of(calls, 0.25)):
        write_run(tmp_path / f"rank-{number}", frame, **({"rank": number, "ranks": 2, "launch": "x"} if stated else {}))
    folders = [tmp_path / "rank-0", tmp_path / "rank-1"]
    if not stated:
        with pytest.raises(ValueError, match=r"rank-1: call 0 of layer .* is also in .*rank-0; .* --as ranks"):
            parts.join(find_runs(folders))
    out = join(*folders, out=tmp_path / "out", ranks=not stated)
    got, want = (schema.read_per_layer(run / schema.PER_LAYER) for run in (out, whole))
    pd.testing.assert_frame_equal(got, want, rtol=1e-9)
    assert "rank" not in load_run(out).info
    assert load_run(out).info["complete"] is True
    if stated:
        info = load_run(join(folders[0], out=tmp_path / "one")).info
        assert info["ranks_missing"] == [1] and info["complete"] is False


def test_a_rank_twice_or_of_another_launch_is_refused(calls, tmp_path):
    for number, frame in enumerate(ranks_of(calls, 0.5)):
        write_run(tmp_path / f"rank-{number}", frame, rank=0, launch="x")
    with pytest.raises(ValueError, match=r"rank-1: rank is 0, as in .*rank-0; name each rank once"):
        parts.join(find_runs([tmp_path]))
    write_run(tmp_path / "rank-1", calls, rank=1, launch="y")
    with pytest.raises(ValueError, match=r"rank-1: launch is 'y', .*rank-0 has 'x'"):
        parts.join(find_runs([tmp_path]))


def test_a_repeated_run_is_not_added(calls, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "copy")
    with pytest.raises(ValueError, match=r"copy: call 0 of layer .* if one run was repeated, keep one"):
        parts.join(find_runs([whole, tmp_path / "copy"]))
    with pytest.raises(ValueError, match=r"whole is given twice"):
        find_runs([whole, whole.parent])


def test_incomplete_parts_and_silent_layers(calls, tmp_path):
    silent = calls["layer"].iloc[0]
    write_run(tmp_path / "a", calls[(calls["call"] < 6) & (calls["layer"] != silent)], layers_silent=[silent, "never"])
    write_run(tmp_path / "b", calls[calls["call"] >= 6], complete=False)
    info = load_run(join(tmp_path / "a", tmp_path / "b", out=tmp_path / "out")).info
    assert info["complete"] is False and info["layers_silent"] == ["never"]


FIELDS = {
    "world": "other",
    "checkpoint_sha256": "00" * 32,
    "reference": "fp64",
    "tokens": "valid",
    "sites": "wan",
    "sampling": {"rows": 4},
    "variants": {"shipped": "11" * 32, "fixed": "ef" * 32},
}


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("merge", ["parts", "runs"])
def test_incompatible_runs_name_the_field(calls, whole, tmp_path, field, merge):
    write_run(tmp_path / "other", calls, seed=1, **{field: FIELDS[field]})
    runs = find_runs([whole, tmp_path / "other"])
    with pytest.raises(ValueError, match=rf"other: {field}.* is .*, .*whole has .*`shrinkage compare`"):
        parts.join(runs) if merge == "parts" else pool.merge_runs(runs, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("field", ["seed", "clips", "engine", "device"])
def test_parts_are_of_one_run(calls, whole, tmp_path, field):
    write_run(tmp_path / "other", calls, **{field: "changed"})
    with pytest.raises(
        ValueError, match=rf"other: {field} is 'changed', .*whole has .*these are different runs: --as runs"
    ):
        parts.join(find_runs([whole, tmp_path / "other"]))


@pytest.mark.parametrize("label", ["in_features", "out_features", "block"])
def test_a_layer_of_another_shape_is_named(calls, whole, tmp_path, label):
    changed = calls.assign(**{label: calls[label].where(calls["layer"] != "blocks.0.cross_attn.q", 64)})
    write_run(tmp_path / "other", changed, seed=1)
    with pytest.raises(ValueError, match=rf"layer 'blocks.0.cross_attn.q': {label} is 64 in run .*, (256|0) in run"):
        pool.merge_runs(find_runs([whole, tmp_path / "other"]), tmp_path / "out")
    assert not any((tmp_path / "out").iterdir())  # nothing half-written
    write_run(tmp_path / "a", calls[calls["call"] < 3])
    write_run(tmp_path / "b", changed[calls["call"] >= 3])
    with pytest.raises(ValueError, match=f"layer 'blocks.0.cross_attn.q': {label} is 64 in one of"):
        parts.join(find_runs([tmp_path / "a", tmp_path / "b"]))
