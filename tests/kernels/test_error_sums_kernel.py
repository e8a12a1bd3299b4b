"""Triton output sums against the fp64 reference."""

import pytest
import torch

from analysis.kernels import error_sums
from analysis.measure import stats

PLAIN, EFFECTIVE = 1e-6, 1e-5
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


def outputs(m, n, v, dtype, device, gain=1.0):
    """Reference, variants that lose 1 % a step and gain noise, bias, norm, groups; a NaN row in group 0."""
    y = torch.randn(m, n, dtype=torch.float64) * gain
    yqs = [(y * (1 - 0.01 * (i + 1)) + 0.01 * gain * torch.randn(m, n)).to(BF16) for i in range(v)]
    bias, weight = torch.randn(n) * gain, torch.rand(n) + 0.5
    y = y.to(dtype)
    groups = (torch.arange(m) % 3 != 2).to(torch.uint8) * (1 + torch.arange(m) % 2).to(torch.uint8)
    if m > 3:
        groups[3] = 0
        y[3], yqs[0][3] = torch.nan, torch.inf
    return [q.to(device) for q in yqs], *(t.to(device) for t in (y, bias, weight, groups))


def assert_sums(actual: torch.Tensor, yqs, y, bias, groups, norm) -> None:
    """Positive sums relative to themselves, signed ones to the sums of their terms' magnitudes."""
    expected = stats.output_sums(yqs, y, bias, groups, norm)
    assert actual.shape == expected.shape and actual.dtype == torch.float64
    assert torch.isfinite(actual).all()
    scale = expected.clone()
    scale[..., 2] = (expected[..., 0] * expected[..., 1]).sqrt()  # sum |e y| <= sqrt(S_ee S_yy)
    scale[..., 4] = (expected[..., 3] * expected[..., 1]).sqrt()
    tolerance = torch.tensor([PLAIN] * 7 + [EFFECTIVE], device=actual.device, dtype=torch.float64)
    error = (actual - expected).abs()
    assert (error <= tolerance * scale).all(), f"relative errors {(error / scale).amax((0, 1)).tolist()}"


@pytest.mark.parametrize("dtype", [BF16, FP32, FP64])
@pytest.mark.parametrize("shape", [(1, 7), (9, 3), (7, 100), (2, 1000), (4, 3072)])
def test_equal_to_the_reference(shape, dtype, device):
    yqs, y, bias, weight, groups = outputs(*shape, 2, dtype, device)
    for b in (bias, None):
        for norm in ((weight, 1e-6), None):
            assert_sums(error_sums.output_sums(yqs, y, b, groups, norm), yqs, y, b, groups, norm)


@pytest.mark.gpu
@pytest.mark.parametrize("gain", [1.0, 1e6, 1e-6])
def test_equal_to_the_reference_at_size(gain):
    yqs, y, bias, weight, groups = outputs(4400, 3072, 2, BF16, "cuda", gain)
    for norm in ((weight, 1e-6), None):
        assert_sums(error_sums.output_sums(yqs, y, bias, groups, norm), yqs, y, bias, groups, norm)


@pytest.mark.parametrize("gain", [1e6, 1e-6])
@pytest.mark.parametrize("variants", [1, 3])
def test_magnitudes_and_numbers_of_variants(gain, variants, device):
    yqs, y, bias, weight, groups = outputs(9, 200, variants, BF16, device, gain)
    norm = (weight.bfloat16(), 1e-6)
    assert_sums(error_sums.output_sums(yqs, y, bias, groups, norm), yqs, y, bias, groups, norm)


def test_strong_shrinkage_before_a_norm_keeps_five_digits(device):
    """What the norm removes is a hundred times what it leaves."""
    y = torch.randn(6, 800)
    yq = y * 0.9 + 0.01 * torch.randn(6, 800)
    groups = torch.ones(6, dtype=torch.uint8)
    yq, y, groups, weight = (v.to(device) for v in (yq, y, groups, torch.rand(800) + 0.5))
    sums = error_sums.output_sums([yq], y, None, groups, (weight, 1e-6))
    assert sums[0, 0, 7] < 0.02 * sums[0, 0, 1]
    assert_sums(sums, [yq], y, None, groups, (weight, 1e-6))


def test_a_sum_without_the_cross_term_would_fail():
    yqs, y, bias, weight, groups = outputs(9, 200, 1, BF16, "cpu")
    sums = stats.output_sums(yqs, y, bias, groups, (weight, 1e-6))
    sums[..., 7] *= 1 + 2e-5
    with pytest.raises(AssertionError, match="relative errors"):
        assert_sums(sums, yqs, y, bias, groups, (weight, 1e-6))


def test_strides_two_runs_and_empty_inputs(device):
    yqs, y, bias, _, groups = outputs(12, 90, 2, BF16, device)
    first, second = (error_sums.output_sums(yqs, y, bias, groups, None) for _ in range(2))
    assert torch.equal(first, second)
    wide = torch.full((14, 200), torch.nan, dtype=BF16, device=device)
    wide[1:13, :90] = y
    turned = [q.t().contiguous().t() for q in yqs]
    assert torch.equal(error_sums.output_sums(turned, wide[1:13, :90], bias, groups, None), first)
    empty = error_sums.output_sums([q[:0] for q in yqs], y[:0], bias, groups[:0], None)
    assert empty.shape == (2, 2, 8) and (empty == 0).all()


def test_bad_inputs_are_refused(device):
    yqs, y, bias, weight, groups = outputs(4, 6, 2, BF16, device)
    with pytest.raises(ValueError, match="at least one variant"):
        error_sums.output_sums([], y, bias, groups, None)
    with pytest.raises(ValueError, match=r"expected yqs\[1\] as floating \[4, 6\]"):
        error_sums.output_sums([yqs[0], yqs[1][:3]], y, bias, groups, None)
    with pytest.raises(ValueError, match="expected norm weight"):
        error_sums.output_sums(yqs, y, bias, groups, (weight[:5], 1e-6))
