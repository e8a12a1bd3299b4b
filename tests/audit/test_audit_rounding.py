"""Each planted rounding is named in each dtype, with the figures that the closed forms predict."""

from __future__ import annotations

import planted_torch as planted
import pytest
import torch

from analysis.audit import assert_rounds_to_nearest, audit
from analysis.numerics import Rounding, quantize_rows

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rounding", planted.ROUNDINGS)
def test_each_rounding_is_named(rounding, dtype):
    report = audit(planted.ROUNDINGS[rounding], dtypes=[dtype], edges=False)
    assert report.rounding == rounding, str(report)
    assert report.clean == (rounding not in ("truncate", "floor", "double_rounded", "other"))


@pytest.mark.parametrize("kernel", planted.CORRECT, ids=lambda kernel: kernel.__name__)
def test_a_correct_kernel_is_clean_with_all_edge_checks(kernel):
    report = audit(kernel)
    assert report.clean, str(report)
    assert report.rounding == ("half_even" if kernel is planted.half_even else "half_away")


def test_a_frozen_random_number_generator_is_still_stochastic():
    report = audit(planted.stochastic_frozen, edges=False)
    assert report.rounding == "stochastic" and report.clean


def test_figures_of_truncation_and_of_rounding():
    shipped = audit(planted.truncate, dtypes=[torch.float32], edges=False).figures
    assert shipped["code_mismatch"] == pytest.approx(0.5, abs=0.02)
    assert shipped["magnitude_bias_lsb_interval"][1] < -0.45
    low, high = shipped["mean_error_lsb_interval"]
    assert low < 0.01 and high > -0.01
    assert shipped["rmse_lsb"] == pytest.approx(3**-0.5, abs=0.01)
    assert shipped["row_gain"] == pytest.approx(0.99, abs=0.002)
    right = audit(planted.half_even, dtypes=[torch.float32], edges=False).figures
    assert right["code_mismatch"] == 0.0
    assert abs(right["magnitude_bias_lsb"]) < 0.01 and abs(right["mean_error_lsb"]) < 0.01
    assert right["rmse_lsb"] == pytest.approx(12**-0.5, abs=0.01)
    assert right["row_gain"] == pytest.approx(1.0, abs=2e-4)


def test_floor_shows_in_the_raw_mean_and_not_in_the_magnitude():
    figures = audit(planted.floor, dtypes=[torch.float32], edges=False).figures
    assert figures["mean_error_lsb"] == pytest.approx(-0.5, abs=0.02)
    assert abs(figures["magnitude_bias_lsb"]) < 0.05


def test_ties_are_counted_apart():
    figures = audit(planted.half_away_inverse, dtypes=[torch.bfloat16], edges=False).figures
    assert figures["exact_ties"] > 1000
    assert figures["exact_ties_not_half_even"] == pytest.approx(figures["exact_ties"] / 2, rel=0.1)
    assert figures["code_mismatch"] == 0.0


def test_the_smallest_input_is_a_row_that_anyone_can_type():
    report = audit(planted.truncate, dtypes=[torch.float32], edges=False)
    assert report.figures["smallest_input"] == {
        "input": "a row [127, 0.6, 0, ...]",
        "got": "code 0",
        "expected": "code 1",
    }
    assert report.figures["demonstration"]["got"] == "[127, 0, 0, 0, 1, 2, 126, 0, -1, -2, -126]"
    assert report.figures["demonstration"]["half_even"] == "[127, 0, 0, 1, 2, 2, 127, -1, -2, -2, -127]"


def test_dtypes_that_differ_give_the_verdict_of_the_worst():
    def mixed(x):
        return planted.truncate(x) if x.dtype == torch.bfloat16 else planted.half_even(x)

    report = audit(mixed, edges=False)
    assert report.rounding == "truncate" and report.figures["dtype"] == "bfloat16"
    assert report.by_dtype["float16"]["rounding"] == "half_even"


def test_the_contract_references_are_named():
    for rounding, name in ((Rounding.SHIPPED, "truncate"), (Rounding.FIXED, "half_away"), (Rounding.FLOOR, "floor")):
        report = audit(lambda x, rounding=rounding: quantize_rows(x, rounding))
        assert report.rounding == name
        assert {finding.check for finding in report.defects} <= {"rounding"}, str(report)


def test_the_assertion_passes_and_fails_readably():
    assert assert_rounds_to_nearest(planted.half_even).clean
    assert_rounds_to_nearest(planted.half_even, ties="half_even")
    with pytest.raises(
        AssertionError, match=r"does not round to nearest\n.*bfloat16 input: rounds by truncate"
    ) as caught:
        assert_rounds_to_nearest(planted.truncate)
    assert "a row [127, 0.601562, 0, ...]" in str(caught.value)
    with pytest.raises(AssertionError, match="rounds by half_away, expected half_even"):
        assert_rounds_to_nearest(planted.half_away_inverse, ties="half_even")
    with pytest.raises(AssertionError, match="rounds by stochastic"):
        assert_rounds_to_nearest(planted.stochastic)
    with pytest.raises(ValueError, match="unknown tie rule 'up'"):
        assert_rounds_to_nearest(planted.half_even, ties="up")


def own_reference(x):
    """The reference that came with the kernel, with the kernel's defect."""
    absmax = x.float().abs().amax(dim=1)
    return (x.float() * (127.0 / absmax)[:, None]).to(torch.int8), absmax / 127.0


def test_a_kernel_that_agrees_with_its_own_reference_is_still_caught():
    x = torch.randn(64, 256)
    codes, scales = planted.truncate(x)
    expected, expected_scales = own_reference(x)
    assert (codes - expected).abs().max() <= 1 and (codes != expected).double().mean() < 0.01
    torch.testing.assert_close(scales, expected_scales)
    assert audit(planted.truncate, edges=False).rounding == "truncate"
    assert audit(own_reference, edges=False).rounding == "truncate"


def test_an_output_cosine_above_0_9998_does_not_fool_it():
    x, w = torch.randn(64, 512), torch.randn(128, 512)
    codes, scales = planted.truncate(x)
    y = (codes.float() * scales[:, None]) @ w.t()
    cosine = torch.nn.functional.cosine_similarity(y.flatten(), (x @ w.t()).flatten(), dim=0)
    assert cosine > 0.9998
    assert torch.allclose(codes.float(), planted.half_even(x)[0].float(), atol=1)
    assert not audit(planted.truncate, edges=False).clean
