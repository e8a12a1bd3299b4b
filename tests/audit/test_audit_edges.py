"""Each planted edge defect is named, in each dtype, and nothing that is right is called wrong."""

from __future__ import annotations

import planted_torch as planted
import pytest
import torch

from analysis.audit import audit

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def defect(kernel, check):
    return next(finding for finding in audit(kernel, dtypes=[torch.float32]).defects if finding.check == check)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("check", planted.EDGES)
def test_each_edge_defect_is_named(check, dtype):
    report = audit(planted.EDGES[check], dtypes=[dtype])
    assert check in {finding.check for finding in report.defects}, str(report)
    assert not report.clean


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("check", sorted(set(planted.EDGES) - {"huge_absmax", "two_runs"}))
def test_an_edge_defect_leaves_the_rounding_verdict_alone(check, dtype):
    assert audit(planted.EDGES[check], dtypes=[dtype]).rounding == "half_even"


@pytest.mark.parametrize(
    ("kernel", "check"),
    [
        (planted.last_lanes_truncate, "positions"),
        (planted.reads_beyond, "tails"),
        (planted.unwritten_scale, "unwritten"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_further_defects(kernel, check):
    assert check in {finding.check for finding in audit(kernel).defects}


def test_findings_say_what_was_given_what_came_and_what_should_have_come():
    finding = defect(planted.tail_truncates, "positions")
    assert "K = 17" in finding.input and finding.got == "columns 16 round by truncate, the others by half_even"
    wrap = defect(planted.wraps, "wrap")
    assert "code -128" in wrap.got and wrap.expected == "code 127"
    leak = next(
        f for f in audit(planted.zero_row_leak, dtypes=[torch.float32]).defects if f.check == "row_independence"
    )
    assert "rows [3, 15] zero" in leak.input and "other rows changed" in leak.got
    lost = defect(planted.unwritten, "unwritten")
    assert "16 of 8192 codes never written, first at [(0, 511)" in lost.got


def test_a_narrow_scale_is_a_note():
    report = audit(planted.bf16_scale)
    checks = {finding.check: finding for finding in report.findings}
    assert report.clean and checks["scale_used"].severity == checks["scale_dtype"].severity == "note"


def test_a_refusal_is_a_note_with_the_reason():
    report = audit(planted.refuses_odd)
    assert report.clean
    tails = next(finding for finding in report.findings if finding.check == "tails")
    assert "K = 1, K = 17" in tails.input and "K must be a multiple of 64, got 1" in tails.got
    strided = next(finding for finding in report.findings if finding.check == "noncontiguous")
    assert "x must be contiguous" in strided.got


def test_nan_swallowed_and_nan_as_largest_code_are_told_apart():
    def swallow(x):
        return planted.half_even(torch.nan_to_num(x, nan=0.0))

    def largest(x):
        codes, scale = planted.half_even(torch.nan_to_num(x, nan=0.0))
        return torch.where(x.isnan(), 127, codes).to(torch.int8), scale

    for kernel, text in ((swallow, "swallowed"), (largest, "turned into the largest code")):
        found = [finding for finding in audit(kernel, dtypes=[torch.float32]).findings if finding.check == "nan"]
        assert len(found) == 1 and found[0].severity == "note" and text in found[0].got


def test_an_input_larger_than_the_guard_is_not_needed_to_see_a_look_beyond_the_row():
    finding = next(
        f for f in audit(planted.reads_beyond, dtypes=[torch.float16]).defects if f.check in ("tails", "rows")
    )
    assert finding.severity == "defect"


def test_an_epsilon_in_the_scale_is_a_note_with_its_threshold():
    def with_epsilon(x):
        scale = (x.float().abs().amax(dim=1) / 127.0).clamp(min=1e-8)
        return torch.round(torch.nan_to_num(x.float() / scale[:, None])).clamp(-127, 127).to(torch.int8), scale

    report = audit(with_epsilon, dtypes=[torch.float32])
    tiny = [finding for finding in report.findings if finding.check == "tiny_absmax"]
    assert report.clean and len(tiny) == 1 and tiny[0].severity == "note"

    def coarse_epsilon(x):
        scale = (x.float().abs().amax(dim=1) / 127.0).clamp(min=1e-3)
        return torch.round(torch.nan_to_num(x.float() / scale[:, None])).clamp(-127, 127).to(torch.int8), scale

    report = audit(coarse_epsilon, dtypes=[torch.float32])
    assert "tiny_absmax" in {finding.check for finding in report.defects}
