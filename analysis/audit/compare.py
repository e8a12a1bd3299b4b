"""Does an output agree with what the base verdict predicts for its input? The one comparison of every edge check.

Codes are predicted in fp64 from the input, rounded as the target was found to round; elements on a decision boundary
may go either way. Scales are predicted from absmax with the ratio seen on ordinary inputs. So a kernel is held to its
own rounding, and only what an edge case changes is reported.

    wrong = disagreement(subject, x, outcome, rows=torch.tensor([True, False]))
    # None, or ("code 0 at (3, 12), 7 wrong codes", "code -1")
"""

from __future__ import annotations

import torch
from torch import Tensor

from analysis.audit.call import Outcome
from analysis.audit.classify import usable
from analysis.audit.rules import Batch
from analysis.audit.subject import Subject

SCALE_SLACK = 1e-3


def disagreement(
    subject: Subject, x: Tensor, outcome: Outcome, rows: Tensor | None = None
) -> tuple[str, str] | None:  # fmt: skip
    """(got, expected) of the first wrong code or scale, or None. `rows` bool [M] limits the comparison."""
    x = x.to(subject.dtype)
    try:
        batch = subject.batch([(x, outcome)])
    except ValueError as error:
        got, _, expected = str(error).partition(", expected ")
        return got, expected
    if len(batch.x) == 0:
        return None
    judged = torch.ones_like(batch.x, dtype=torch.bool) if rows is None else rows[batch.row]
    return _codes(subject, batch, judged) or _scales(subject, batch, judged)


def wrong_codes(subject: Subject, batch: Batch) -> tuple[Tensor, Tensor]:
    """(bool, int64): elements whose code is not a permitted one, and the code that was expected."""
    grid, rule = subject.grid, subject.rounding
    low, high = subject.hypothesis.predict(batch, grid)
    assert subject.decision is not None
    if rule in ("stochastic", "other") or subject.decision.positions:
        p = grid.position(subject.hypothesis.scaled(batch)).nan_to_num()
        low, high = p.floor().long() - 1, p.ceil().long() + 1
    inside = usable(batch, grid, subject.hypothesis)
    wrong = inside & ((batch.index < low) | (batch.index > high))
    return wrong | ((batch.absmax == 0) & (batch.index != 0)), torch.where(batch.absmax == 0, 0, low)


def _codes(subject: Subject, batch: Batch, judged: Tensor) -> tuple[str, str] | None:
    wrong, expected = wrong_codes(subject, batch)
    wrong &= judged
    if not bool(wrong.any()):
        return None
    i = int(wrong.nonzero()[0])
    place = f"({int(batch.row[i])}, {int(batch.col[i])})"
    return f"code {int(batch.index[i])} at {place}, {int(wrong.sum())} wrong codes", f"code {int(expected[i])}"


def _scales(subject: Subject, batch: Batch, judged: Tensor) -> tuple[str, str] | None:
    if subject.scale_ratio is None:
        return None
    median, spread = subject.scale_ratio
    expected = batch.absmax / subject.grid.limit * median
    slack = (2 * spread + SCALE_SLACK) * expected
    if subject.scale_dtype is not None:
        info = torch.finfo(subject.scale_dtype)
        slack = slack + info.smallest_normal * info.eps
    wrong = judged & (batch.absmax > 0) & ~((batch.returned - expected).abs() <= slack)
    if not bool(wrong.any()):
        return None
    i = int(wrong.nonzero()[0])
    return f"scale worth {float(batch.returned[i]):.6g} in row {int(batch.row[i])}", f"{float(expected[i]):.6g}"
