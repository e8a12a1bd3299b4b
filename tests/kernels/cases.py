"""Inputs that a row quantiser must survive, and equality that takes NaN as equal to NaN."""

import torch

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def sample(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Both signs, several magnitudes, ties, outliers, zero rows between others, tiny and huge rows."""
    x = torch.randn(rows, columns) * torch.logspace(-3, 3, rows)[:, None]
    if rows > 8:
        x[1] = 0
        x[2] = torch.arange(columns) % 255 / 2.0 - 63.5
        x[2, 0] = 127.0  # every s of this row is a multiple of 1/2
        x[3, columns // 2] = 500.0
        x[4] *= 0
        x[5] = torch.randn(columns) * 1e-38
        x[6] = 1e-44
        x[7] = (3e38 if dtype != torch.float16 else 6e4) * torch.rand(columns)
    return x.to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in every bit that counts: NaN equals NaN."""
    return a.dtype == b.dtype and a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())
