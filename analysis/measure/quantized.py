"""What an engine makes of one input: the codes of every variant, and the sums that belong to the input alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from analysis.measure import histogram


@dataclass(frozen=True)
class QuantizedInput:
    """One input, quantised once per variant and shared by every layer that reads it."""

    x_bf16: Tensor  # bf16 [M, K]
    codes: Sequence[Tensor] | Tensor  # per variant: int8 [M, K]
    scales: Sequence[Tensor] | Tensor  # per variant: fp32 [M]
    groups: Tensor  # uint8 [M]; rows with NaN or Inf are 0
    row_sums: Tensor  # fp64 [2, 4]
    code_sums: Tensor  # fp64 [V, 2, 5]

    @cached_property
    def sums(self) -> Tensor:
        """fp64 [V, 2, 9]: what the layers that share this input have in common of stats.ALL_SUMS."""
        return torch.cat([self.row_sums.expand(len(self.code_sums), -1, -1), self.code_sums], dim=2)

    @cached_property
    def code_counts(self) -> Tensor:
        """int64 [V, 2, 256]: how often each code occurs in a sample of the rows, see `histogram`."""
        return histogram.count_codes(self.codes, self.groups)
