"""The fused pass: the same codes as the single kernels, and sums that equal the reference's."""

import pytest
import torch

from analysis import numerics
from analysis.kernels import quantize
from analysis.measure import stats
from analysis.numerics import Rounding
from tests.kernels.cases import DTYPES, same, sample

SHIPPED, FIXED = BOTH = (Rounding.SHIPPED, Rounding.FIXED)


def groups_of(rows: int, device: str) -> torch.Tensor:
    return (torch.arange(rows) * 7 % 3).to(torch.uint8).to(device)


def assert_sums(p: quantize.QuantizedPass, x: torch.Tensor, groups: torch.Tensor) -> None:
    """Counts equal; sums within 1e-6 of the sum of their terms' magnitudes."""
    row_sums, kept = stats.row_sums(x, groups)
    assert same(p.groups, kept)
    assert same(p.row_sums[:, :3].contiguous(), row_sums[:, :3])
    torch.testing.assert_close(p.row_sums[:, 3], row_sums[:, 3], rtol=1e-6, atol=0)
    s = numerics.scaled(x)
    for codes, sums in zip(p.codes, p.code_sums, strict=True):
        expected = stats.code_sums(x, s, codes, kept)
        assert same(sums[:, 2:].contiguous(), expected[:, 2:].contiguous()), "counts"
        for g in stats.GROUPS:
            error = (codes.double().abs() - s.double().abs())[kept == g]
            bound = 1e-6 * error.abs().sum()
            assert abs(sums[g - 1, 0] - expected[g - 1, 0]) <= bound
            # the sum of squares in fp64 throughout: the reference squares in fp32
            square = ((codes.double() - s.double())[kept == g] ** 2).sum()
            assert abs(sums[g - 1, 1] - square) <= 1e-6 * square + 1e-30  # fp32 squares vanish below 1e-38


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (17, 3), (9, 1000), (2, 3072)])
def test_pass_equals_kernels_and_reference(shape, dtype, device):
    x = sample(*shape, dtype).to(device)
    groups = groups_of(shape[0], device)
    p = quantize.quantize_pass(x, BOTH, groups)
    assert p.row_sums.shape == (2, 4) and p.code_sums.shape == (2, 2, 5)
    assert p.row_sums.dtype == p.code_sums.dtype == torch.float64
    assert same(p.x_bf16, x.to(torch.bfloat16))
    for rounding, codes, scales in zip(BOTH, p.codes, p.scales, strict=True):
        assert all(map(same, (codes, scales), quantize.quantize_rows(x, rounding)))
    assert_sums(p, x, groups)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_pass_at_full_width(dtype):
    test_pass_equals_kernels_and_reference((4400, 3072), dtype, "cuda")


def test_rows_that_are_not_finite_are_counted_and_left_out(device):
    x = torch.randn(12, 50)
    x[2, 1], x[5, 2], x[7] = torch.nan, torch.inf, 0
    groups = torch.tensor([1] * 4 + [2] * 5 + [0] * 3, dtype=torch.uint8)
    x, groups = x.to(device), groups.to(device)
    before = groups.clone()
    p = quantize.quantize_pass(x, BOTH, groups)
    assert same(groups, before)
    assert p.groups.tolist() == [1, 1, 0, 1, 2, 0, 2, 2, 2, 0, 0, 0]
    assert p.row_sums[:, :3].tolist() == [[3, 1, 0], [4, 1, 1]]
    assert torch.isfinite(p.code_sums).all()
    assert_sums(p, x, groups)
    assert (p.code_sums[0, :, 2] > 0).all(), "truncation mismatches"
    assert (p.code_sums[1, :, 2] == 0).all(), "half away never differs from half-even except at ties"


def test_order_single_variants_strides_and_empty_inputs(device):
    x, groups = sample(9, 12).to(device), groups_of(9, device)
    both, turned = (quantize.quantize_pass(x, r, groups) for r in (BOTH, BOTH[::-1]))
    assert same(both.code_sums, turned.code_sums.flip(0)) and same(both.codes[0], turned.codes[1])
    for i, rounding in enumerate(BOTH):
        one = quantize.quantize_pass(x, (rounding,), groups)
        assert same(one.codes[0], both.codes[i]) and same(one.code_sums[0], both.code_sums[i])
        assert same(one.row_sums, both.row_sums)
    for view in (x.t(), x.bfloat16()[:, ::2], x[::3]):
        p = quantize.quantize_pass(view, BOTH, groups_of(len(view), device))
        assert same(p.x_bf16, view.to(torch.bfloat16))
        assert_sums(p, view, groups_of(len(view), device))
    empty = quantize.quantize_pass(x[:0], BOTH, groups[:0])
    assert empty.x_bf16.shape == (0, 12) and (empty.row_sums == 0).all() and (empty.code_sums == 0).all()


def test_two_runs_give_the_same_bits(device):
    x, groups = sample(12, 96).to(device), groups_of(12, device)
    first, second = (quantize.quantize_pass(x, BOTH, groups) for _ in range(2))
    assert same(first.code_sums, second.code_sums) and same(first.row_sums, second.row_sums)
