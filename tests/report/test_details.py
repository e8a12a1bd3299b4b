"""What the page shows of one layer is what the tables hold; nothing that came with a run can end its script element."""

from __future__ import annotations

import base64
import hashlib
import json
import re

import numpy as np
import pytest
from synthetic import make_calls, make_run

from analysis.report import details, layout, style
from analysis.report.html import build_report
from analysis.results import summary

EVIL = "</script><script>alert(1)</script><!--"


def built(calls, names=None, **options):
    per_layer = summary.summarize(calls, "w")
    names = names or [row["layer"] for row in layout.in_order(per_layer)]
    return details.build(per_layer, calls, names, **options), per_layer, names


def test_curves_are_ratios_of_sums():
    calls = make_calls(4, 6)
    held, _, names = built(calls, subject="shipped")
    assert [kernel for kernel, _ in held["kernels"]] == ["shipped", "fixed"]
    assert held["calls"]["labels"][4] == "call 4, corridor, clip 1, step 1" and held["calls"]["each"] == 1
    layer = held["layers"][2]
    mine = calls[(calls["layer"] == names[2]) & (calls["variant"] == "fixed")].sort_values("call")
    assert layer["calls"][0][1] == pytest.approx((mine["sum_ee"] / mine["sum_yy"]).tolist(), rel=1e-3)
    by_step = mine.groupby("step")[["sum_ee", "sum_yy", "sum_ey"]].sum()
    assert layer["steps"][0][1] == pytest.approx((by_step["sum_ee"] / by_step["sum_yy"]).tolist(), rel=1e-3)
    cosine = by_step["sum_ey"] / np.sqrt(by_step["sum_ee"] * by_step["sum_yy"])
    assert layer["steps"][1][1] == pytest.approx(cosine.tolist(), abs=1e-4)


def test_counts_are_shares_of_codes():
    held, per_layer, names = built(make_calls(2, 3))
    row = per_layer[(per_layer["layer"] == names[0]) & (per_layer["variant"] == "shipped")].iloc[0]
    share, words = held["layers"][0]["counts"][1][0]
    assert held["counts"][1] == "set to zero"
    assert share == pytest.approx(row["zeroed_fraction"], rel=1e-3) and f"({row['zeroed']:,})" in words


def test_many_calls_share_points_and_say_so(monkeypatch):
    monkeypatch.setattr(details, "_MOST", 4)
    monkeypatch.setattr(details, "_FEWEST", 2)
    calls = make_calls(2, 10)
    held, _, names = built(calls)
    assert held["calls"]["each"] == 3 and len(held["calls"]["labels"]) == 4
    assert held["calls"]["labels"][-1] == "call 9, corridor, clip 3, step 0 … call 9, corridor, clip 3, step 0"
    first = calls[(calls["layer"] == names[0]) & (calls["variant"] == "shipped") & (calls["call"] < 3)]
    expected = first["sum_ee"].sum() / first["sum_yy"].sum()
    assert held["layers"][0]["calls"][0][0][0] == pytest.approx(expected, rel=1e-3)


def test_what_was_not_measured_is_null_and_nothing_is_not_a_number():
    calls = make_calls(3, 4)
    gone = (calls["layer"] == calls["layer"].iloc[0]) & (calls["call"] == 1) & (calls["variant"] == "fixed")
    calls = calls[~gone].reset_index(drop=True)
    calls.loc[calls["call"] == 2, ["sum_yy", "sum_ee", "sum_ey", "rows"]] = 0
    held, _, names = built(calls)
    place = names.index(make_calls(3, 4)["layer"].iloc[0])
    assert held["layers"][place]["calls"][0][1][1] is None
    assert held["layers"][place]["calls"][0][0][2] is None
    json.dumps(held, allow_nan=False)


def test_without_calls_or_labels():
    calls = make_calls(3, 1, labelled=False)
    held, per_layer, names = built(calls)
    assert "calls" not in held and "steps" not in held
    assert not any("block" in words for words in held["layers"][0]["about"])
    assert "calls" not in details.build(per_layer, None, names)


def test_a_layer_that_one_kernel_lacks():
    calls = make_calls(3, 3)
    gone = (calls["layer"] == calls["layer"].iloc[0]) & (calls["variant"] == "fixed")
    held, _, names = built(calls[~gone].reset_index(drop=True), subject="shipped")
    layer = held["layers"][names.index(calls["layer"].iloc[0])]
    assert [texts[1] for texts in layer["metrics"]] == ["–"] * len(details.METRICS)
    assert layer["counts"][0][1] == [None, "–"]


@pytest.fixture(scope="module")
def evil(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evil")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(style, "render", lambda made: (b"PNG", '<svg viewBox="0 0 1 1"></svg>'))
        run = make_run(folder / "run", 9, 4, prefix=EVIL, variants=("shipped", "fixed", EVIL))
        return build_report([run], folder / "out").index.read_text(encoding="utf-8")


def test_data_cannot_end_its_script_element(evil):
    (data,) = re.findall(r'<script type="application/json" class="data">(.*?)</script>', evil, re.DOTALL)
    held = json.loads(data)
    assert len(held["layers"]) == 9 and all(layer["name"].startswith(EVIL) for layer in held["layers"])
    assert EVIL not in evil


def test_the_policy_names_the_scripts_that_run_and_no_others(evil):
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', evil)
    scripts = re.findall(r"<script>(.*?)</script>", evil, re.DOTALL)
    hashes = {f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts}
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert set(rules["script-src"].split()) == hashes
    assert rules["default-src"] == "'none'"
    assert "sourceMappingURL" not in evil
