"""Targets that print, hang, exit, kill their process, or return something else."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
from planted_torch import half_even, truncate


def nasty(x):
    """Correct and noisy, but kills its process for K = 17 and hangs for 17 rows."""
    print("not JSON {")  # noqa: T201
    os.write(1, b"\x00\xff more noise\n")
    if x.shape[1] == 17:
        os.kill(os.getpid(), signal.SIGKILL)
    if x.shape[0] == 17:
        time.sleep(1000)
    return half_even(x)


def hangs(x):
    time.sleep(1000)


def exits(x):
    sys.exit("enough")


def needs_cuda(x):
    return half_even(x.cuda())


def no_codes(x):
    return x.float(), x.float()


def int32_codes(x):
    codes, scales = half_even(x)
    return codes.int(), scales


def two_scales(x):
    codes, scales = half_even(x)
    return codes, scales, scales * 0


def transposed_codes(x):
    codes, scales = half_even(x)
    return codes.t(), scales


def other_signature(x, group, scales_out):
    codes, scales_out[:] = truncate(x)
    return codes


def adapter(target, x):
    scales = torch.empty(x.shape[0])
    return target(x, 64, scales), scales
