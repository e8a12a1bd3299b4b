"""The Triton weight quantiser equals the reference to the last bit."""

import pytest
import torch

from analysis import numerics
from analysis.kernels.weight import quantize_weight

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def weight(rows, columns, dtype=torch.float32):
    w = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * columns))
    w[0] *= 50
    w[rows // 2] = 0
    # ties: absmax 127 gives scale 1, so that halves must go to even
    w[-1] = (torch.arange(columns) - columns // 2).clamp(-126, 126) + 0.5
    w[-1, 0] = 127
    return w.to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (17, 1000), (3, 4097), (33, 256)])
def test_codes_and_scales_equal_the_reference(shape, dtype):
    w = weight(*shape, dtype)
    codes, scales = quantize_weight(w)
    expected = numerics.quantize_weight(w)
    assert torch.equal(codes, expected[0]) and torch.equal(scales, expected[1])


def test_strides_and_an_empty_weight():
    w = weight(24, 40)
    codes, scales = quantize_weight(w.t())
    expected = numerics.quantize_weight(w.t())
    assert torch.equal(codes, expected[0]) and torch.equal(scales, expected[1])
    assert quantize_weight(torch.empty(0, 4, device=DEVICE))[0].shape == (0, 4)


def test_rounding_half_away_would_not_pass():
    w = weight(17, 256)
    codes, scales = quantize_weight(w)
    away = numerics.half_away(w / scales[:, None]).clamp(-128, 127).to(torch.int8)
    assert not torch.equal(codes, away)


def test_not_a_matrix():
    with pytest.raises(ValueError, match=r"expected a floating \[rows, K\] tensor"):
        quantize_weight(torch.zeros(3, device=DEVICE))
