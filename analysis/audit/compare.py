"""Does an output agree with what the base verdict predicts for its input? The one comparison of every edge check.

Codes are predicted in fp64 from the input, rounded as the target was found to round; elements on a decision boundary
may go either way. Scales are predicted from absmax with the ratio seen on ordinary inputs. So a kernel is held to its
own rounding, and only what an edge case changes is reported.

    wrong = disagreement(subject, x, outcome, rows=torch.tensor([True, False]))
    # None, or ("code 0 at (3, 12), 7 wrong codes", "code -1")
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from analysis.audit.call import Outcome
from analysis.audit.classify import usable
from analysis.audit.rules import RETURNED, Batch, Hypothesis, Step, absmax_step
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
    """(bool, int64): elements whose code is not a permitted one, and the code that was expected.

    Permitted is what the step that was decided on gives, or the returned one: where they differ within fp32 rounding,
    ordinary inputs do not tell which was used. A returned step that is wrong is found by its own check.
    """
    hypothesis = subject.hypothesis
    low, high = _permitted(subject, batch, hypothesis)
    wrong = (batch.index < low) | (batch.index > high)
    if bool(wrong.any()):
        for step in _alternatives(subject):
            other = _permitted(subject, batch, replace(hypothesis, step=step))
            wrong &= (batch.index < other[0]) | (batch.index > other[1]) | ~torch.isfinite(batch.returned)
    wrong &= usable(batch, subject.grid, hypothesis) & subject.written(batch.index)
    zero = (batch.absmax == 0) & subject.written(batch.index)
    return wrong | (zero & (batch.index != 0)), torch.where(batch.absmax == 0, 0, low)


def _alternatives(subject: Subject) -> list[Step]:
    """The returned step, and the absmax step that it amounts to on ordinary inputs."""
    if subject.scale_ratio is None or subject.scale_ratio[1] > SCALE_SLACK:
        return [RETURNED]
    limit = subject.hypothesis.step.limit or subject.grid.limit / subject.scale_ratio[0]
    return [RETURNED, absmax_step(limit)]


def _permitted(subject: Subject, batch: Batch, hypothesis: Hypothesis) -> tuple[Tensor, Tensor]:
    assert subject.decision is not None
    if subject.rounding in ("stochastic", "other") or subject.decision.positions:
        p = subject.grid.position(hypothesis.scaled(batch)).nan_to_num()
        return p.floor().long() - 1, p.ceil().long() + 1
    return hypothesis.predict(batch, subject.grid)


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
