"""The rules of the verdicts, each both ways. A world without the defect must not be reported as reproducing it."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from synthetic import make_calls

from analysis.report import claims
from analysis.report.claims import ISSUE, Verdict
from analysis.results import summary


def verdicts(world: str = "synthetic", calls: int = 5, per_call: bool = True, **options) -> dict[str, Verdict]:
    frame = make_calls(32, calls, **options)
    layers = summary.summarize(frame, world)
    return {f.claim.id: f.verdict for f in claims.judge(claims.gather(layers, frame if per_call else None))}


def test_a_world_like_the_issues():
    found = verdicts()
    assert all(found[c] in (Verdict.KIND, Verdict.VALUE) for c in claims.CORE)
    assert all(found[c] is Verdict.UNMEASURED for c in ("C6", "C7", "C8"))


def test_a_world_without_the_defect_is_not_reported_as_reproduced():
    found = verdicts(ratio=1.0, cosine=0.0)
    assert [found[c] for c in ("C1", "C2", "C3", "C4")] == [Verdict.NOT] * 4
    assert found["C5"] in (Verdict.KIND, Verdict.VALUE)


def test_equal_kernels_are_not_reported_as_reproduced():
    frame = make_calls(16, 4)
    fixed = frame[frame["variant"] == "fixed"]
    both = pd.concat([fixed, fixed.assign(variant="shipped")], ignore_index=True)
    findings = claims.judge(claims.gather(summary.summarize(both, "w"), both))
    assert [f.verdict for f in findings[:4]] == [Verdict.NOT] * 4
    assert "kernels equal" in findings[1].note


def test_more_error_without_shrinkage_reproduces_the_ratio_only():
    found = verdicts(cosine=0.0)
    assert found["C3"] in (Verdict.KIND, Verdict.VALUE)
    assert found["C4"] is Verdict.NOT


def test_shrinkage_the_wrong_way_round_is_not_reproduced():
    assert verdicts(cosine=0.73)["C4"] is Verdict.NOT


def test_a_fixed_kernel_that_shrinks_fails_c5():
    frame = make_calls(16, 4)
    both = frame.assign(variant=frame["variant"].map({"shipped": "fixed", "fixed": "shipped"}))
    found = {f.claim.id: f.verdict for f in claims.judge(claims.gather(summary.summarize(both, "w"), both))}
    assert found["C5"] is Verdict.NOT
    assert found["C1"] is Verdict.NOT


@pytest.mark.parametrize(("ratio", "expected"), [(1.5, Verdict.NOT), (3.0, Verdict.KIND), (5.65, Verdict.VALUE)])
def test_ratio_rule(ratio, expected):
    assert verdicts(ratio=ratio)["C3"] is expected


def test_a_ratio_far_above_the_issues_is_not_the_same_phenomenon():
    assert verdicts(ratio=30.0)["C3"] is Verdict.NOT


def test_absolute_errors_agree_in_value_only_on_the_issues_model():
    options = {"fixed_mse": 5.4e-4, "ratio": 5.6}
    assert verdicts("tiny", **options)["C1"] is Verdict.KIND
    assert verdicts("tiny", **options)["C2"] is Verdict.KIND
    frame = make_calls(32, 5, **options)
    layers = summary.summarize(frame, "matrix-game-3")
    evidence = claims.gather(layers, frame)
    c1, c2 = claims.judge(evidence)[:2]
    for finding, variant, issue in ((c1, "shipped", ISSUE.shipped_rel_mse), (c2, "fixed", ISSUE.fixed_rel_mse)):
        near = abs(evidence.mean("rel_mse", variant).value / issue - 1) <= claims.IN_VALUE
        assert finding.verdict is (Verdict.VALUE if near else Verdict.KIND)


def test_random_weights_are_another_model_than_the_issues():
    for world, same in (("Matrix-Game-3.0", True), ("Matrix-Game-3.0, random weights", False), ("tiny", False)):
        frame = make_calls(32, 5)
        evidence = claims.gather(summary.summarize(frame, world), frame)
        assert evidence.same_model is same
        notes = [f.note for f in claims.judge(evidence)[:2]]
        assert all(("another model" in note) is not same for note in notes), notes


def test_c4_in_value_needs_every_layer_inside():
    frame = make_calls(32, 5, cosine=-0.75)
    layers = summary.summarize(frame, "w")
    shipped = layers["variant"] == "shipped"
    layers.loc[shipped, "error_output_cosine"] = np.linspace(-0.84, -0.63, shipped.sum())
    assert claims.judge(claims.gather(layers, frame))[3].verdict is Verdict.VALUE
    layers.loc[layers.index[shipped][0], "error_output_cosine"] = -0.9
    assert claims.judge(claims.gather(layers, frame))[3].verdict is Verdict.KIND
    layers.loc[layers.index[shipped][:8], "error_output_cosine"] = -0.1
    assert claims.judge(claims.gather(layers, frame))[3].verdict is Verdict.NOT


def test_no_interval_no_verdict_on_means():
    for found in (verdicts(calls=2), verdicts(per_call=False)):
        assert found["C1"] is found["C3"] is Verdict.UNMEASURED
        assert found["C4"] is not Verdict.UNMEASURED


@pytest.mark.parametrize(("kept", "absent"), [("shipped", "fixed"), ("fixed", "shipped")])
def test_one_kernel_only(kept, absent):
    frame = make_calls(8, 4, variants=(kept,))
    findings = claims.judge(claims.gather(summary.summarize(frame, "w"), frame))
    for finding in findings[:3]:
        assert finding.verdict is Verdict.UNMEASURED
        assert finding.note == f"the run has no kernel {absent}"


def test_value_and_verdict_are_separate():
    frame = make_calls(8, 2)
    finding = claims.judge(claims.gather(summary.summarize(frame, "w"), frame))[2]
    assert finding.value[0].isdigit()
    assert finding.verdict is Verdict.UNMEASURED
    assert finding.note == claims.NO_INTERVAL


def test_every_claim_states_its_rule():
    assert [c.id for c in claims.CLAIMS] == [f"C{i}" for i in range(1, 9)]
    assert all(c.rule and c.issue and c.statement for c in claims.CLAIMS)


def test_means_are_the_headline():
    frame = make_calls(16, 4)
    layers = summary.summarize(frame, "w")
    head = summary.headline(layers).set_index("variant")
    for per_call in (frame, None):
        evidence = claims.gather(layers, per_call)
        for variant in ("shipped", "fixed"):
            assert evidence.mean("rel_mse", variant).value == pytest.approx(
                head.loc[variant, "mean_rel_mse"], rel=1e-12
            )
            angle = evidence.mean("error_output_cosine", variant).value
            assert angle == pytest.approx(head.loc[variant, "mean_cosine"], rel=1e-12)
