"""Correct kernels stay clean over a thousand seeds. The verdict of a correct kernel rests on no statistic."""

from __future__ import annotations

import planted_torch as planted
import torch

from analysis.audit import audit

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SEEDS = 1000


def grouped(x):
    m, k = x.shape
    blocks = x.float().view(m, k // 16, 16)
    scale = (blocks.abs().amax(dim=-1) / 127.0).clamp(min=1e-30)
    return torch.round(torch.nan_to_num(blocks / scale[..., None])).to(torch.int8).view(m, k), scale


KERNELS = (*planted.CORRECT, grouped)


def test_no_false_alarm_in_a_thousand_seeds():
    alarms = []
    for seed in range(SEEDS):
        kernel, dtype = KERNELS[seed % len(KERNELS)], DTYPES[seed // len(KERNELS) % len(DTYPES)]
        report = audit(kernel, dtypes=[dtype], seed=seed, shape=(8, 64))
        if not report.clean or report.rounding not in ("half_even", "half_away"):
            alarms.append(f"seed {seed}: {report}")
        if kernel is planted.half_even and report.rounding != "half_even":
            alarms.append(f"seed {seed}: called {report.rounding}")
    assert not alarms, "\n".join(alarms[:3])
