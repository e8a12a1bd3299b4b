# mypy: disable-error-code="no-untyped-def"
"""Triton weight quantiser: per output channel, half to even, in one launch. Twin of `numerics.quantize_weight`.

    codes, scales = quantize_weight(w)        # int8 [N, K], fp32 [N], equal to the reference bit for bit

It exists so that measuring a layer on a GPU need not keep the codes of every weight: making them again reads the weight
once, which is a hundredth of the layer's products.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from analysis.kernels.common import launch, to_fp32
from analysis.numerics import check_rows

WARPS = 4
BLOCK = 1024
HALF_EVEN = tl.constexpr(1.5 * 2.0**23)  # adding it leaves no bits below 1, and fp32 addition rounds half to even
SCALE_MIN = tl.constexpr(1e-12)


@triton.jit
def _weight_kernel(w_ptr, w_stride, codes_ptr, scales_ptr, columns, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    w_ptr += row * w_stride
    codes_ptr += row * columns
    at = tl.arange(0, SIZE)
    top = tl.zeros([SIZE], tl.float32)
    for start in range(0, columns, SIZE):
        w = to_fp32(tl.load(w_ptr + start + at, mask=start + at < columns, other=0.0))
        top = tl.maximum(top, tl.abs(w))
    scale = tl.maximum(tl.math.div_rn(tl.max(top, 0), 127.0), SCALE_MIN)
    tl.store(scales_ptr + row, scale)
    for start in range(0, columns, SIZE):
        inside = start + at < columns
        w = to_fp32(tl.load(w_ptr + start + at, mask=inside, other=0.0))
        code = tl.math.div_rn(w, tl.zeros([SIZE], tl.float32) + scale) + HALF_EVEN
        code = tl.minimum(tl.maximum(code - HALF_EVEN, -128.0), 127.0)
        tl.store(codes_ptr + start + at, code.to(tl.int8), mask=inside)


def quantize_weight(w: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise each row of w by its own absmax, half to even.

    w: bf16, fp16 or fp32 [N, K], any strides -> codes int8 [N, K], scales fp32 [N] = max(absmax / 127, 1e-12).

    Raises ValueError when w is not a floating [N, K] tensor, as the reference does.
    """
    check_rows(w)
    if w.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        w = w.float()
    if w.stride(1) != 1:
        w = w.contiguous()
    (rows, columns), device = w.shape, w.device
    codes = torch.empty(rows, columns, dtype=torch.int8, device=device)
    scales = torch.empty(rows, dtype=torch.float32, device=device)
    if rows > 0:
        size = max(16, min(BLOCK, triton.next_power_of_2(columns)))
        launch(
            _weight_kernel, (rows, 1, 1), (w, w.stride(0), codes, scales, columns), (size,),
            num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return codes, scales
