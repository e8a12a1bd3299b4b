"""The fused pair against its two steps, and against the reference."""

import pytest
import torch

from analysis import numerics
from analysis.kernels import error_sums, gemm, pair
from analysis.measure import stats


def layer(m: int, n: int, k: int, device: str, y_dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """One input, quantised by truncation and rounding, with zero rows and rows left out, one of them NaN."""
    x, w, bias = torch.randn(m, k) * 2, torch.randn(n, k) / k**0.5, torch.randn(n)
    x[::6] = 0
    groups = (torch.arange(m) % 3).to(torch.uint8)
    a0, a0_scales = numerics.quantize_rows(x, numerics.Rounding.SHIPPED)
    a1, a1_scales = numerics.quantize_rows(x, numerics.Rounding.FIXED)
    b, b_scales = numerics.quantize_weight(w)
    y = numerics.bf16_linear(x, w, bias).to(y_dtype)
    if m > 3:
        y[3], a0_scales[3] = torch.nan, torch.nan
        groups[3] = 0
    named = {"a0": a0, "a0_scales": a0_scales, "a1": a1, "a1_scales": a1_scales, "b": b, "b_scales": b_scales}
    return {name: v.to(device) for name, v in (named | {"bias": bias, "y": y, "groups": groups}).items()}


def check(m: int, n: int, k: int, device: str, y_dtype: torch.dtype = torch.bfloat16, blocks=None) -> None:
    args = layer(m, n, k, device, y_dtype)
    weight = torch.rand(n, device=device) + 0.5
    for bias, norm in [(args["bias"], (weight, 1e-6)), (None, None), (args["bias"], None)]:
        sums = pair.pair_error_sums(**(args | {"bias": bias}), norm=norm, blocks=blocks)
        yqs = [gemm.int8_linear(args[a], args[f"{a}_scales"], args["b"], args["b_scales"], bias) for a in ("a0", "a1")]
        for expected in (
            error_sums.output_sums(yqs, args["y"], bias, args["groups"], norm),
            stats.output_sums(yqs, args["y"], bias, args["groups"], norm),
        ):
            assert sums.shape == expected.shape and torch.isfinite(sums).all()
            scale = expected.abs()
            scale[..., 2] = (expected[..., 0] * expected[..., 1]).sqrt()
            scale[..., 4] = (expected[..., 3] * expected[..., 1]).sqrt()
            tolerance = torch.tensor([1e-6] * 7 + [1e-5], device=device, dtype=torch.float64)
            assert ((sums - expected).abs() <= tolerance * scale).all(), ((sums - expected) / scale).tolist()


@pytest.mark.parametrize("size", [(1, 40, 17), (33, 40, 130), (12, 33, 64)])
def test_equal_to_two_layers_and_their_sums(size, device):
    check(*size, device)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(4400, 3072, 3072), (513, 3072, 3072), (1000, 257, 1000), (17, 3072, 96)])
def test_equal_at_size(size):
    check(*size, "cuda")
    check(*size, "cuda", torch.float32)


def test_strides_two_runs_empty_inputs_and_errors(device):
    args = layer(20, 24, 40, device)
    sums = pair.pair_error_sums(**args)
    assert torch.equal(sums, pair.pair_error_sums(**args)), "two runs differ"
    turned = {name: args[name].t().contiguous().t() for name in ("a0", "a1", "b", "y")}
    assert torch.equal(sums, pair.pair_error_sums(**(args | turned)))
    empty = {name: v if name in ("b", "b_scales", "bias") else v[:0] for name, v in args.items()}
    assert (pair.pair_error_sums(**empty) == 0).all()
    with pytest.raises(ValueError, match="expected a1 as"):
        pair.pair_error_sums(**(args | {"y": args["y"][:4]}))
    with pytest.raises(ValueError, match="not fp64"):
        pair.pair_error_sums(**(args | {"y": args["y"].double()}))
