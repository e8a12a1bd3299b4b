"""The project's own records in a report: C7 and C8, the closed loop and the fix's cost, each where it belongs."""

import copy
import hashlib
import json
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from analysis.report import closed_loop, kernel_times, records, study_claims
from analysis.report.blocks import Figure, Table, Text
from analysis.report.chapter import Chapter
from analysis.report.claims import Estimate, Verdict
from analysis.results.load import load_run

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).parent))
from synthetic import make_run  # noqa: E402
from synthetic_studies import add_studies  # noqa: E402

FALLS = Estimate(5.0, 4.8, 5.2)


def findings(run):
    return {f.claim.id: f for f in Chapter(load_run(run)).findings}


def timed(*ratios, product=0.0):
    """A record of shapes with these (median, low, high) of fixed / shipped; a product takes `product` times shipped."""
    shapes = []
    for number, (median, low, high) in enumerate(ratios):
        spread = {"median": median, "low": low, "high": high, "quartile_low": low, "quartile_high": high}
        times = {
            name: {"median_s": 1e-5 * by, "low_s": 0.9e-5 * by, "high_s": 1.1e-5 * by, "repeats": 9}
            for name, by in (("shipped", 1.0), ("fixed", median))
        }
        shapes.append(
            {
                "rows": 512 * (number + 1), "features": 64, "dtype": "float32", "sites": "q", "times": times,
                "gb_per_s": {"shipped": 100.0, "fixed": 100 / median},
                "of_copy": {"shipped": 0.5, "fixed": 0.5 / median}, "ratio_to_shipped": {"fixed": spread},
                "int8_linear_s": 1e-5 * product,
            }
        )  # fmt: skip
    return {"device": "D", "what": "W", "copy_gb_per_s": 200.0, "rounds": 9, "shapes": shapes}


@pytest.fixture
def times(tmp_path, monkeypatch):
    """A record of made-up times in the place of the project's."""
    path = tmp_path / "quantizers.json"
    path.write_text(json.dumps(timed((1.0, 0.99, 1.01), (1.2, 1.19, 1.21))))
    monkeypatch.setattr(records, "find", lambda name, place: path if name == records.QUANTIZERS else None)
    return path


@pytest.mark.parametrize(
    ("ratios", "errors", "expected"),
    [
        ([(0.99, 0.98, 1.0), (1.005, 1.0, 1.01)], FALLS, Verdict.KIND),
        ([(0.99, 0.98, 1.0), (1.05, 1.011, 1.08)], FALLS, Verdict.NOT),
        ([(0.99, 0.98, 1.0), (1.01, 1.0, 1.02)], FALLS, Verdict.UNDECIDED),
        ([(1.02, 1.01, 1.03), (1.05, 1.03, 1.08)], FALLS, Verdict.NOT),
        ([(1.0, 0.99, 1.01)], Estimate(1.1, 0.9, 1.3), Verdict.NOT),
        ([(1.0, 0.99, 1.01)], Estimate(5.0), Verdict.UNMEASURED),
    ],
)
def test_the_rule_of_the_cost(ratios, errors, expected):
    value, verdict, note = study_claims.judge_cost(timed(*ratios), errors)
    assert verdict is expected
    assert f"{max(r[0] for r in ratios):.3f} [" in value and "on D" in note


def test_the_product_takes_its_share_of_the_layer():
    record = timed((1.03, 1.02, 1.038), product=3)
    assert study_claims.layer_ratio(record["shapes"][0]) == pytest.approx(
        {"median": 1.0075, "low": 1.005, "high": 1.0095}
    )
    value, verdict, note = study_claims.judge_cost(record, FALLS)
    assert verdict is Verdict.KIND and "1.008 [1.005, 1.010]" in value and "the quantiser alone 1.030" in note
    assert study_claims.judge_cost(timed((1.03, 1.025, 1.038), product=1), FALLS)[1] is Verdict.NOT


def test_without_the_record_the_cost_is_unknown(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "find", lambda name, place: None)
    run = make_run(tmp_path / "run", layers=8, calls=4, world="tiny")
    found = findings(run)
    assert found["C7"].verdict is found["C8"].verdict is Verdict.UNMEASURED
    assert kernel_times.section(Chapter(load_run(run))) is None
    assert closed_loop.section(Chapter(load_run(run))) is None


def test_the_cost_is_a_section_of_a_report_of_one_run(tmp_path, times):
    run = load_run(make_run(tmp_path / "run", layers=8, calls=4))
    section = kernel_times.section(Chapter(run))
    said, figure, table = section.blocks
    assert (type(said), type(figure), type(table)) == (Text, Figure, Table)
    assert "free at 1, slower at 1 of 2 shapes" in said.text and "1.000 … 1.200" in figure.alt
    assert [row[-1].text for row in table.rows] == ["", "free", "", "slower"]
    assert kernel_times.section(Chapter(run, prefix="run1-")) is None
    assert findings(run.path)["C8"].verdict is Verdict.NOT


def test_other_quantisers_stand_between_the_two():
    record = timed((1.0, 0.99, 1.01), (1.2, 1.19, 1.21)) | {"command": "shrinkage bench --theirs a/b/their.py:quantize"}
    for shape in record["shapes"]:
        for kind in ("times", "gb_per_s", "of_copy"):
            shape[kind]["their.py:quantize"] = shape[kind]["shipped"]
        shape["ratio_to_shipped"]["their.py:quantize"] = shape["ratio_to_shipped"]["fixed"]
    assert kernel_times.kernels(record) == ["shipped", "their.py:quantize", "fixed"]
    assert "1.000 … 1.200 times the time of a/b/their.py:quantize" in kernel_times.words(record)


@pytest.mark.parametrize("lost", ["shapes", "device"])
def test_another_file_is_refused(times, lost):
    record = json.loads(times.read_text())
    del record[lost]
    times.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=f"lacks {lost}: not a record of `shrinkage bench --kernels`"):
        records.quantizers()


def test_a_record_without_the_fix_or_no_json_is_refused(times):
    record = json.loads(times.read_text())
    broken = copy.deepcopy(record)
    del broken["shapes"][1]["times"]["fixed"]
    times.write_text(json.dumps(broken))
    with pytest.raises(ValueError, match="times of fixed"):
        records.quantizers()
    times.write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        records.quantizers()


def test_the_committed_times_are_read_as_they_stand(tmp_path):
    record = json.loads((ROOT / records.QUANTIZERS_PLACE / records.QUANTIZERS).read_text())
    found = findings(make_run(tmp_path / "run", layers=8, calls=4))["C8"]
    worst = max(map(study_claims.layer_ratio, record["shapes"]), key=lambda r: r["median"])
    assert f"{worst['median']:.3f} [{worst['low']:.3f}, {worst['high']:.3f}]" in found.value
    assert record["device"] in found.note and record["what"] == "Triton kernels"
    assert all(kernel_times.AGAIN in shape["times"] for shape in record["shapes"])


def test_the_name_of_the_control_is_the_benchs():
    from analysis.measure import kernel_bench

    assert kernel_times.AGAIN == kernel_bench.AGAIN


def test_tiny_world_is_judged_on_the_record_which_is_named(tmp_path):
    record = records.closed_loop_record()
    found = findings(make_run(tmp_path / "run", layers=8, calls=4, world="tiny"))["C7"]
    assert found.verdict is Verdict.KIND
    for said in (
        f"{record.pairs} scene-seed pairs × {record.info['clips']} clips",
        record.info["device"],
        record.place,
    ):
        assert said in found.note
    assert "this run" not in found.note


def test_a_smaller_run_stands_beside_the_record_and_a_larger_one_before_it(tmp_path, monkeypatch):
    run = add_studies(make_run(tmp_path / "run", layers=16, calls=4, world="tiny"))
    note = findings(run)["C7"].note
    assert note.startswith("record: ") and "this run: 4 scene-seed pairs" in note
    texts = [b.text for b in closed_loop.section(Chapter(load_run(run))).blocks if isinstance(b, Text)]
    assert texts[0].startswith("Record, ") and any(t.startswith("This run, 4 scene-seed pairs") for t in texts)
    small = records.closed_loop_record()
    small.table["pairs"] = 3
    monkeypatch.setattr(records, "closed_loop_record", lambda: small)
    assert findings(run)["C7"].note.startswith("4 scene-seed pairs")


def test_another_world_is_not_judged_on_the_record(tmp_path):
    assert findings(make_run(tmp_path / "run", layers=8, calls=4))["C7"].verdict is Verdict.UNMEASURED


def test_the_committed_closed_loop_is_of_the_shipped_checkpoint_and_large_enough():
    record = records.closed_loop_record()
    model = (ROOT / "data" / "tiny-world" / "model.safetensors").read_bytes()
    assert record.info["checkpoint_sha256"] == hashlib.sha256(model).hexdigest()
    assert record.pairs >= 64 and record.info["clips"] >= 16
    questions = record.table[(record.table["metric"] == "psnr_db") & (record.table["window"] == "all")]
    assert "undecided" not in set(questions["verdict"])
    assert np.isfinite(questions[["difference_lo", "difference_hi"]].to_numpy()).all()


def test_the_wheel_holds_the_records():
    held = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    for name, place in (
        (records.QUANTIZERS, records.QUANTIZERS_PLACE),
        ("closed_loop.csv", records.CLOSED_LOOP_PLACE),
        ("closed_loop.json", records.CLOSED_LOOP_PLACE),
    ):
        assert held["force-include"][f"{place}/{name}"] == f"analysis/report/{name}"
        assert (ROOT / place / name).is_file()
