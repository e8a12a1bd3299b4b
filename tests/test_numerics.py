"""The contract's reference: every rounding on known values, edge rows, exact products."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from analysis import numerics
from analysis.numerics import Rounding
from tests.helpers import assert_close

ROW = [127, 0.4, 0.5, 0.6, 1.5, 2.5, 126.6, -0.6, -1.5, -2.5, -126.6]
TABLE = {
    Rounding.HALF_EVEN: [127, 0, 0, 1, 2, 2, 127, -1, -2, -2, -127],
    Rounding.FIXED: [127, 0, 1, 1, 2, 3, 127, -1, -2, -3, -127],
    Rounding.SHIPPED: [127, 0, 0, 0, 1, 2, 126, 0, -1, -2, -126],
    Rounding.FLOOR: [127, 0, 0, 0, 1, 2, 126, -1, -2, -3, -127],
    Rounding.FLOOR_HALF: [127, 0, 1, 1, 2, 3, 127, -1, -1, -2, -127],
}


def exact_half_away(s: float) -> int:
    """Round half away from zero in rational arithmetic."""
    f = Fraction(s)
    magnitude = (2 * abs(f) + 1) // 2
    return int(magnitude if f >= 0 else -magnitude)


def assert_rounds_half_away(rounding: Rounding, x: torch.Tensor) -> None:
    codes, _ = numerics.quantize_rows(x, rounding)
    s = numerics.scaled(x).double().numpy()
    expected = np.vectorize(exact_half_away, otypes=[np.int64])(s)
    assert np.array_equal(codes.numpy(), expected)
    assert np.abs(codes.numpy().astype(int)).max(initial=0) <= 127


@pytest.mark.parametrize("rounding", TABLE)
def test_rounding_on_the_known_row(rounding):
    codes, scales = numerics.quantize_rows(torch.tensor([ROW]), rounding)
    assert codes[0].tolist() == TABLE[rounding]
    assert scales.tolist() == [1.0]


def test_fixed_is_half_away_and_shipped_is_not():
    x = torch.tensor([ROW])
    assert_rounds_half_away(Rounding.FIXED, x)
    with pytest.raises(AssertionError):
        assert_rounds_half_away(Rounding.SHIPPED, x)


finite = st.floats(-(2.0**60), 2.0**60, width=32, allow_subnormal=True)


@settings(max_examples=200, deadline=None)
@given(arrays(np.float32, (3, 7), elements=finite))
def test_fixed_is_half_away_on_any_input(values):
    assert_rounds_half_away(Rounding.FIXED, torch.from_numpy(values))


@settings(max_examples=200, deadline=None)
@given(arrays(np.float32, (2, 9), elements=st.floats(-127, 127, width=32)))
def test_fixed_is_half_away_at_scale_one(values):
    values[:, 0] = 127
    assert_rounds_half_away(Rounding.FIXED, torch.from_numpy(values))


def test_shipped_fails_on_random_input():
    with pytest.raises(AssertionError):
        assert_rounds_half_away(Rounding.SHIPPED, torch.randn(4, 64))


def test_scales_are_correctly_rounded():
    x = torch.rand(5000, 1) + 0.5
    inv, absmax = numerics.row_scales(x)
    assert np.array_equal(inv.numpy(), np.float32(127) / absmax.numpy())
    _, scales = numerics.quantize_rows(x, Rounding.FIXED)
    assert np.array_equal(scales.numpy(), np.float32(1) / inv.numpy())
    _, weight_scales = numerics.quantize_weight(x)
    assert np.array_equal(weight_scales.numpy(), x[:, 0].numpy() / np.float32(127))
    assert not np.array_equal((x[:, 0].reciprocal() * 127).numpy(), inv.numpy()), "two roundings would be noticed"


def test_half_away_at_the_value_where_adding_a_half_is_wrong():
    below = torch.tensor([0.5 - 2.0**-25, -(0.5 - 2.0**-25)])
    assert (below + 0.5 * below.sign()).trunc().abs().tolist() == [1, 1], "the usual formula rounds it up"
    assert numerics.half_away(below).abs().tolist() == [0, 0]


def test_truncation_bias_is_half_a_code_and_rounding_has_none():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 2048, generator=generator)
    s = numerics.scaled(x).double()
    bias = {}
    for rounding in (Rounding.SHIPPED, Rounding.FIXED, Rounding.HALF_EVEN, Rounding.STOCHASTIC):
        codes, _ = numerics.quantize_rows(x, rounding, torch.Generator().manual_seed(2))
        bias[rounding] = float((codes.double().abs() - s.abs()).mean())
    assert bias[Rounding.SHIPPED] == pytest.approx(-0.5, abs=0.01)
    assert bias[Rounding.FIXED] == pytest.approx(0, abs=0.01)
    assert bias[Rounding.HALF_EVEN] == pytest.approx(0, abs=0.01)


def test_stochastic_is_unbiased_seeded_and_needs_a_generator():
    x = torch.full((1, 20001), 0.25)
    x[0, 0] = 127
    draws = [numerics.quantize_rows(x, Rounding.STOCHASTIC, torch.Generator().manual_seed(s))[0] for s in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    assert float(draws[0][0, 1:].float().mean()) == pytest.approx(0.25, abs=0.02)
    with pytest.raises(ValueError, match="generator"):
        numerics.quantize_rows(x, Rounding.STOCHASTIC)


@pytest.mark.parametrize("rounding", [Rounding.SHIPPED, Rounding.FIXED, Rounding.HALF_EVEN, Rounding.FLOOR])
def test_edge_rows_leave_their_neighbours_alone(rounding):
    good = torch.randn(1, 33)
    rows = [torch.zeros(1, 33), torch.full((1, 33), 1e-44), torch.full((1, 33), float("nan")), good.clone()]
    rows[3][0, 5] = float("inf")
    codes, scales = numerics.quantize_rows(torch.cat([good, *rows, good]), rounding)
    alone, alone_scale = numerics.quantize_rows(good, rounding)
    for r in (0, 5):
        assert torch.equal(codes[r], alone[0]) and scales[r] == alone_scale[0]
    assert (codes[1:5] == 0).all()
    assert scales[1] == 0 and scales[2] == 0
    assert torch.isnan(scales[3:5]).all(), "a row that is not finite must not look like a result"
    y = numerics.int8_linear(codes, scales, codes[:2], scales[:2].nan_to_num(), torch.tensor([3.0, 4.0]))
    assert y[1].tolist() == [3, 4], "a zero row gives exactly the bias"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (17, 3), (4, 1000)])
def test_shapes_dtypes_and_strides(shape, dtype):
    x = (torch.randn(shape[1], shape[0]) * 3).to(dtype).t()
    codes, scales = numerics.quantize_rows(x, Rounding.FIXED)
    same, same_scales = numerics.quantize_rows(x.contiguous(), Rounding.FIXED)
    assert codes.shape == shape and scales.shape == shape[:1]
    assert torch.equal(codes, same) and torch.equal(scales, same_scales)


@pytest.mark.parametrize("huge", [3e38, 1e-36])
def test_extreme_magnitudes_stay_finite(huge):
    codes, scales = numerics.quantize_rows(torch.tensor([[huge, -huge, huge / 2]]), Rounding.FIXED)
    assert codes.tolist()[0][:2] == [127, -127] and codes[0, 2] in (63, 64)
    assert torch.isfinite(scales).all()


def test_bad_rows_are_refused():
    for bad in (torch.zeros(3), torch.zeros(2, 2, dtype=torch.int8), torch.zeros(2, 0)):
        with pytest.raises(ValueError, match=r"expected a floating \[rows, K\]"):
            numerics.quantize_rows(bad, Rounding.FIXED)
    with pytest.raises(ValueError, match="unknown rounding 'nearest'; known: shipped, fixed"):
        numerics.parse_rounding("nearest")


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (17, 5, 33), (20, 64, 1041), (33, 7, 5000)])
def test_int8_matmul_is_exact_at_the_extremes(m, n, k):
    a = torch.randint(-128, 128, (m, k), dtype=torch.int8)
    b = torch.randint(-128, 128, (n, k), dtype=torch.int8)
    a[0], b[0] = -128, -128
    expected = a.numpy().astype(np.int64) @ b.numpy().astype(np.int64).T
    assert np.array_equal(numerics.int8_matmul(a, b).numpy(), expected)


def test_int8_matmul_without_a_fast_path_is_exact_too(monkeypatch):
    monkeypatch.setattr(numerics, "_cpu_int_mm_is_exact", lambda: False)
    a = torch.full((3, 3000), 127, dtype=torch.int8)
    assert (numerics.int8_matmul(a, a) == 127 * 127 * 3000).all()


def test_weight_quantiser():
    w = torch.randn(6, 40)
    w[2] = 0
    codes, scales = numerics.quantize_weight(w)
    assert scales[2] == torch.tensor(1e-12) and (codes[2] == 0).all()
    assert torch.equal(codes[0].float(), torch.round(w[0] / scales[0]))
    assert codes.abs().amax(dim=1)[[0, 1, 3, 4, 5]].tolist() == [127] * 5


@pytest.mark.parametrize("native", [True, False])
def test_bf16_linear_is_the_bf16_layer(native, monkeypatch):
    monkeypatch.setattr(numerics, "_multiplies_bf16", lambda: native)
    x, w, b = torch.randn(40, 96), torch.randn(24, 96), torch.randn(24)
    ours = numerics.bf16_linear(x, w, b)
    exact = x.bfloat16().double() @ w.bfloat16().double().T + b.bfloat16().double()
    rounded = exact.bfloat16()
    assert (ours == rounded).float().mean() > 0.99, "one rounding, at the end"
    assert_close(ours, exact, rms=2.0**-9, max=2.0**-8, what="bf16 linear")


def test_int8_linear_rounds_in_the_contracts_order():
    a = torch.tensor([[3, -5]], dtype=torch.int8)
    b = torch.tensor([[7, 11]], dtype=torch.int8)
    a_scale, b_scale, bias = torch.tensor([0.1]), torch.tensor([0.3]), torch.tensor([1.0])
    acc = np.float32(3 * 7 - 5 * 11)
    product = torch.tensor(acc * np.float32(0.1) * np.float32(0.3)).bfloat16()
    assert torch.equal(numerics.int8_linear(a, a_scale, b, b_scale, bias)[0, 0], product + bias.bfloat16()[0])
