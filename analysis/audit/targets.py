"""The project's own quantisers as audit targets: `shrinkage audit analysis.audit.targets:fixed`.

`shipped` and `fixed` are the Triton kernels; `reference_*` are the plain PyTorch ones of the numeric contract.
"""

from __future__ import annotations

from torch import Tensor

from analysis.numerics import Rounding, quantize_rows


def shipped(x: Tensor) -> tuple[Tensor, Tensor]:
    """The kernel of issue #90, defect kept."""
    from analysis.kernels import quantize

    return quantize.quantize_rows(x, Rounding.SHIPPED)


def fixed(x: Tensor) -> tuple[Tensor, Tensor]:
    """The repaired kernel."""
    from analysis.kernels import quantize

    return quantize.quantize_rows(x, Rounding.FIXED)


def reference_shipped(x: Tensor) -> tuple[Tensor, Tensor]:
    return quantize_rows(x, Rounding.SHIPPED)


def reference_fixed(x: Tensor) -> tuple[Tensor, Tensor]:
    return quantize_rows(x, Rounding.FIXED)


def reference_half_even(x: Tensor) -> tuple[Tensor, Tensor]:
    return quantize_rows(x, Rounding.HALF_EVEN)
