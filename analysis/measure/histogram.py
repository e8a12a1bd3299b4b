"""How often each int8 code occurs in a sample of rows. Any device, without waiting for it.

    counts = count_codes(codes, groups)      # codes int8 [V, M, K], groups uint8 [M] -> int64 [V, 2, 256]

Which rows are taken is said in `analysis.results.codes`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from analysis.measure import stats
from analysis.results.codes import BINS, LOWEST, stride


def count_codes(codes: Sequence[Tensor] | Tensor, groups: Tensor) -> Tensor:
    """Counts of the codes -128 .. 127 over every n-th row, by variant and group of rows (1 valid, 2 padding).

    Args:
        codes: int8 [M, K] per variant.
        groups: uint8 [M]; rows of other groups do not count.

    Returns:
        int64 [V, 2, 256] on the device of the codes.
    """
    step = stride(len(groups))
    taken = torch.stack([c[::step] for c in codes]).long() - LOWEST  # [V, R, K]
    # A histogram a row, so that a GPU's atomic additions do not all meet in the few bins around zero.
    rows = torch.zeros(*taken.shape[:2], BINS, dtype=torch.int64, device=taken.device)  # [V, R, 256]
    rows.scatter_add_(2, taken, torch.ones_like(taken[:1, :1, :1]).expand_as(taken))
    of_group = [rows * (groups[::step] == group)[:, None] for group in stats.GROUPS]
    return torch.stack([part.sum(dim=1) for part in of_group], dim=1)  # [V, 2, 256]
