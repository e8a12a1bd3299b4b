"""Triton int8 linear against the reference, bit for bit."""

import pytest
import torch

from analysis import numerics
from analysis.kernels import gemm

SIZES = [(1, 1, 1), (17, 33, 17), (3, 130, 96), (40, 50, 1100), (70, 64, 128), (1, 5, 1000)]
LARGE_SIZES = [(513, 384, 1000), (1000, 17, 3072), (2100, 3072, 3072), (300, 200, 4096), (129, 257, 100)]
DTYPES = [torch.bfloat16, torch.float32, torch.float16]


def operands(m: int, n: int, k: int, device: str) -> tuple[torch.Tensor, ...]:
    """Codes with both extremes, scales of several magnitudes with zeros among them, and a bias."""
    a, b = (torch.randint(-128, 128, (r, k)).to(torch.int8) for r in (m, n))
    a[m // 2], b[n // 2] = -128, 127
    a_scales, b_scales = torch.rand(m) * 1e-2, torch.rand(n) * 1e-3
    a_scales[::5] = 0
    return tuple(v.to(device) for v in (a, a_scales, b, b_scales, torch.randn(n)))


def check(m: int, n: int, k: int, device: str, dtype: torch.dtype) -> None:
    a, a_scales, b, b_scales, bias = operands(m, n, k, device)
    for extra in (bias, bias.bfloat16(), None):
        y = torch.full((m, n), torch.nan, dtype=dtype, device=device)
        gemm.int8_linear(a, a_scales, b, b_scales, extra, dtype, out=y)
        assert torch.equal(y, numerics.int8_linear(a, a_scales, b, b_scales, extra, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_equal_to_the_reference(size, dtype, device):
    check(*size, device, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("size", LARGE_SIZES)
def test_equal_to_the_reference_at_size(size):
    check(*size, "cuda", torch.bfloat16)


@pytest.mark.parametrize("size", [(1, 5, 16), (70, 33, 160), (33, 64, 65)])
def test_several_inputs_in_one_launch(size, device):
    one = operands(*size, device)
    other = operands(*size, device)
    codes, scales = torch.stack([one[0], other[0]]), torch.stack([one[1], other[1]])
    ys = gemm.int8_linears(codes, scales, *one[2:])
    for y, a, a_scales in zip(ys, codes, scales, strict=True):
        assert torch.equal(y, gemm.int8_linear(a, a_scales, *one[2:]))


def test_views_are_refused_in_one_launch(device):
    a, a_scales, *rest = operands(4, 5, 16, device)
    with pytest.raises(ValueError, match="expected codes and scales contiguous"):
        gemm.int8_linears(torch.stack([a, a])[..., :8], torch.stack([a_scales] * 2), rest[0][:, :8], *rest[1:])


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [gemm.LARGE, gemm.SMALL], ids=["large", "small"])
def test_every_block_shape(blocks):
    for m, n, k in [(300, 200, 384), (129, 257, 112), (129, 257, 100)]:
        a, a_scales, b, b_scales, bias = operands(m, n, k, "cuda")
        y = gemm.int8_linear(a, a_scales, b, b_scales, bias, blocks=blocks)
        assert torch.equal(y, numerics.int8_linear(a, a_scales, b, b_scales, bias))


def test_products_past_2_to_24_are_exact(device):
    k = 2000
    a = torch.full((3, k), 127, dtype=torch.int8, device=device)
    a[1] = -128
    a[2, 1:] = -127  # an odd product, which an fp32 sum could not hold
    one = torch.ones(3, device=device)
    y = gemm.int8_linear(a, one, a, one, None, torch.float32)
    exact = (a.cpu().long() @ a.cpu().long().t()).float()
    assert torch.equal(y.cpu(), exact)


def test_strided_operands_rows_of_nan_and_empty_inputs(device):
    a, a_scales, b, b_scales, bias = operands(20, 24, 40, device)
    wide = torch.full((22, 64), -128, dtype=torch.int8, device=device)
    wide[1:21, :40] = a
    expected = numerics.int8_linear(a, a_scales, b, b_scales, bias)
    assert torch.equal(gemm.int8_linear(wide[1:21, :40], a_scales, b, b_scales, bias), expected)
    assert torch.equal(gemm.int8_linear(a.t().contiguous().t(), a_scales, b, b_scales, bias), expected)
    a_scales[3] = torch.nan
    y = gemm.int8_linear(a, a_scales, b, b_scales, bias)
    assert y[3].isnan().all() and torch.equal(y[4:], expected[4:]) and torch.equal(y[:3], expected[:3])
    assert torch.equal(y[0], bias.bfloat16()), "a zero row gives exactly the bias"
    assert gemm.int8_linear(a[:0], a_scales[:0], b, b_scales, bias).shape == (0, 24)


def test_scales_past_the_end_are_not_read(device):
    a, a_scales, b, b_scales, bias = operands(5, 7, 64, device)
    around_a, around_b = (torch.full((64,), torch.nan, device=device) for _ in range(2))
    around_a[:5], around_b[:7] = a_scales, b_scales
    y = gemm.int8_linear(a, around_a[:5], b, around_b[:7], bias)
    assert torch.equal(y, numerics.int8_linear(a, a_scales, b, b_scales, bias))


def test_bad_operands_are_refused(device):
    a, a_scales, b, b_scales, bias = operands(4, 6, 8, device)
    with pytest.raises(ValueError, match="expected a as int8"):
        gemm.int8_linear(a.float(), a_scales, b, b_scales, bias)
    with pytest.raises(ValueError, match=r"expected b_scales as float32 \[6\]"):
        gemm.int8_linear(a, a_scales, b, a_scales, bias)
    with pytest.raises(ValueError, match="inner sizes differ"):
        gemm.int8_linear(a[:, :7], a_scales, b, b_scales, bias)
    with pytest.raises(ValueError, match=r"expected bias as \[6\]"):
        gemm.int8_linear(a, a_scales, b, b_scales, bias[:5])
    with pytest.raises(ValueError, match="expected out_dtype"):
        gemm.int8_linear(a, a_scales, b, b_scales, bias, torch.float64)
