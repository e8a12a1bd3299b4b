"""Which rounding made these codes? Decided by prediction: the hypothesis that gets every decided element right.

Hypotheses are tried from the ordinary (step = absmax / 127, exact quotient) to the odd (narrow scales, a quotient that
was rounded to bf16 or fp16 first). If none is right everywhere, the codes are compared by position, by sign, against a
step fitted per group, and with stochastic rounding; what is left is "other". No statistic of a correct kernel decides
anything, so a correct kernel cannot be condemned by chance.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from analysis.audit.grid import Grid
from analysis.audit.rules import EPSILON, NARROW, NEAREST, RETURNED, RULES, Batch, Hypothesis, Step, is_tie, steps

LOOSE_EPSILONS = (1e-5, 1e-4)  # a quotient this inexact is reported, not condemned
SAMPLE = 4000  # elements that most wrong hypotheses already fail on
SAME_STEP = 4e-6  # relative: steps closer than this are one step
MIN_DECIDED = 0.3  # of the elements, for a hypothesis to count
OFF_LSB = 1.2  # RMS: beyond it a step is not the one that was used
_BIN_SLACK = 0.05


@dataclass(frozen=True)
class Decision:
    """`rule` is a key of RULES, "stochastic" or "other"; `hypothesis` predicts codes as far as anything does.

    positions: text per odd group of columns or rows, when they round differently from the rest.
    evidence: why "other", or what else should be known.
    """

    rule: str
    hypothesis: Hypothesis
    positions: str = ""
    evidence: str = ""

    @property
    def double_rounded(self) -> bool:
        return self.hypothesis.quotient is not None


def decide(batch: Batch, grid: Grid, static: bool) -> Decision:
    """The rounding of the elements in `batch`; exact ties play no part (see `tie_rule`)."""
    near: dict[str, bool] = {}
    scored: list[tuple[float, Hypothesis]] = []
    sample = batch.where(torch.arange(len(batch.x)) % max(1, len(batch.x) // SAMPLE) == 0)
    for epsilon, quotients in ((EPSILON, (None, *NARROW)), *((e, (None,)) for e in LOOSE_EPSILONS)):
        for quotient, step in itertools.product(quotients, steps(grid, static)):
            if step.name not in near:
                near[step.name] = _rms(batch, step, grid) < OFF_LSB
            if not near[step.name]:
                continue
            for hypothesis, wrong in _score(sample, grid, step, quotient, epsilon):
                if wrong == 0 and _wrong_fraction(batch, grid, hypothesis) == 0:
                    hypothesis = _or_returned(batch, grid, hypothesis)
                    return Decision(hypothesis.rule, hypothesis, evidence=_loose(hypothesis))
                scored.append((wrong, hypothesis))
    plain, candidates = steps(grid, static)[0], [step for step in steps(grid, static) if near[step.name]]
    for step in candidates[:2]:
        if (mixed := _by_place(batch, grid, step)) is not None:
            return mixed
    if (fitted := _fit(batch, grid)) is not None:
        return fitted
    random = [step for step in candidates if _is_stochastic(batch, grid, step)]
    if random:
        likely = max(random, key=lambda step: _log_likelihood(batch, grid, step))
        return Decision("stochastic", Hypothesis(likely, None, "floor"))
    if not scored:
        text = f"codes are more than {OFF_LSB} LSB (RMS) away from the input under every step that was tried"
        return Decision("other", Hypothesis(plain, None, "half_even"), evidence=text)
    wrong, best = min(scored, key=lambda pair: pair[0])
    evidence = f"closest is {best.rule} with step {best.step.name}, wrong in {wrong:.2%} of the codes"
    best = replace(best, quotient=None)
    return Decision("other", best, evidence=_by_sign(batch, grid, best.step) or _spread(batch, grid, best) or evidence)


def tie_rule(batch: Batch, grid: Grid, hypothesis: Hypothesis) -> tuple[str, dict[str, int]]:
    """(rule, counts) from exact ties under power-of-two steps: the nearest rule with the fewest wrong ties.

    counts: seen, and wrong under each rule. With no tie seen the answer is half_even and means nothing.
    """
    step = hypothesis.step.of(batch.absmax, batch.returned)
    exact = torch.frexp(step)[0] == 0.5
    certain = exact & ((batch.returned / step - 1).abs() < 1e-7)  # no epsilon was added
    p = grid.position(batch.x / step)
    ties = (certain if bool(certain.any()) else exact) & is_tie(p) & (p.abs() < grid.hi - 1)
    counts = {rule: int((RULES[rule](p[ties]).long() != batch.index[ties]).sum()) for rule in NEAREST}
    return min(NEAREST, key=lambda rule: counts[rule]), {"seen": int(ties.sum()), **counts}


def usable(batch: Batch, grid: Grid, hypothesis: Hypothesis) -> Tensor:
    """bool: elements inside the range, where no clamp plays a part, of groups that are not zero."""
    p = grid.position(hypothesis.scaled(batch))
    return torch.isfinite(p) & (p.abs() < grid.hi - 1e-3) & (batch.absmax > 0)


def _score(
    batch: Batch, grid: Grid, step: Step, quotient: torch.dtype | None, epsilon: float
) -> Iterator[tuple[Hypothesis, float]]:
    """Each rule with this step and quotient, and the fraction of the decided codes that it gets wrong."""
    ends: tuple[Tensor, Tensor] | None = None
    for rule in RULES:
        hypothesis = Hypothesis(step, quotient, rule, epsilon)
        if ends is None:
            ends = hypothesis.ends(batch, grid)
            keep = usable(batch, grid, hypothesis)
        low, high = (RULES[rule](end) for end in ends)
        decided = keep & (low == high)
        judged = int(decided.sum())
        wrong = int((decided & (batch.index != low)).sum())
        yield hypothesis, wrong / judged if judged >= MIN_DECIDED * len(batch.x) else 1.0


def _or_returned(batch: Batch, grid: Grid, hypothesis: Hypothesis) -> Hypothesis:
    """The same with the returned step, if that explains the codes too and is another one (an added epsilon, say)."""
    off = (batch.returned / hypothesis.step.of(batch.absmax, batch.returned) - 1).abs()
    if not float(off[batch.absmax > 0].max()) > SAME_STEP:
        return hypothesis
    other = replace(hypothesis, step=RETURNED)
    return other if _wrong_fraction(batch, grid, other) == 0 else hypothesis


def _loose(hypothesis: Hypothesis) -> str:
    if hypothesis.epsilon <= EPSILON:
        return ""
    return f"the quotient is off by up to {hypothesis.epsilon:g} of itself, more than fp32 rounding explains"


def _wrong_fraction(batch: Batch, grid: Grid, hypothesis: Hypothesis) -> float:
    keep = usable(batch, grid, hypothesis)
    wrong, decided = hypothesis.mismatch(batch, grid)
    judged = int((decided & keep).sum())
    if judged < MIN_DECIDED * len(batch.x):
        return 1.0
    return int((wrong & keep).sum()) / judged


def _rms(batch: Batch, step: Step, grid: Grid) -> float:
    p = grid.position(batch.x / step.of(batch.absmax, batch.returned))
    error = (batch.index - p)[torch.isfinite(p) & (p.abs() < grid.hi)]
    return float(error.square().mean().sqrt()) if len(error) else float("inf")


def rules_by(batch: Batch, grid: Grid, step: Step, place: Tensor) -> dict[int, list[str]]:
    """For each distinct value of `place`: the rules that are right in all of its decided elements."""
    n = int(place.max()) + 1
    found: dict[int, list[str]] = {int(i): [] for i in torch.unique(place)}
    for rule in RULES:
        hypothesis = Hypothesis(step, None, rule)
        wrong = hypothesis.mismatch(batch, grid)[0] & usable(batch, grid, hypothesis)
        count = torch.zeros(n, dtype=torch.int64).index_add(0, place, wrong.long())
        for i in found:
            if count[i] == 0:
                found[i].append(rule)
    return found


def _by_place(batch: Batch, grid: Grid, step: Step) -> Decision | None:
    """Columns, else rows, that each follow one rule, but not all the same one."""
    for name, place in (("columns", batch.col), ("rows", batch.row)):
        found = rules_by(batch, grid, step, place)
        if not all(found.values()):
            continue
        main = max(RULES, key=lambda rule: sum(rule in rules for rules in found.values()))
        odd = {i: rules[0] for i, rules in found.items() if main not in rules}
        by_rule = {rule: [i for i, r in odd.items() if r == rule] for rule in dict.fromkeys(odd.values())}
        text = "; ".join(f"{name} {spans(places)} round by {rule}" for rule, places in by_rule.items())
        return Decision(main, Hypothesis(step, None, main), positions=f"{text}, the others by {main}")
    return None


def _by_sign(batch: Batch, grid: Grid, step: Step) -> str:
    found = rules_by(batch, grid, step, (batch.x < 0).long())
    if len(found) == 2 and all(found.values()):
        return f"positive values follow {found[0][0]}, negative ones {found[1][0]}"
    return ""


def spans(places: list[int]) -> str:
    """[3, 4, 5, 9] -> "3-5, 9", cut after six spans."""
    runs: list[list[int]] = []
    for i in sorted(places):
        if runs and i == runs[-1][1] + 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs[:6])
    return text + (f" and {len(runs) - 6} more" if len(runs) > 6 else "")


def _fit(batch: Batch, grid: Grid) -> Decision | None:
    """One rule, and only one, is consistent with some step in every group: the step is the middle of what is left."""
    inside = (batch.index.abs() < grid.hi - 1) & (batch.x != 0)
    b = batch.where(inside)
    index = b.index.double()
    cells = {
        "half_even": (index - 0.5, index + 0.5),
        "floor": (index, index + 1),
        "truncate": (torch.where(b.index > 0, index, index - 1), torch.where(b.index < 0, index, index + 1)),
    }
    groups = int(b.group.max()) + 1
    fits: dict[str, Tensor] = {}
    for rule, (below, above) in cells.items():
        ends = torch.stack([grid.value(below) / b.x, grid.value(above) / b.x])
        low = torch.full((groups,), 0.0, dtype=torch.float64).scatter_reduce(0, b.group, ends.amin(0), "amax")
        high = torch.full((groups,), torch.inf, dtype=torch.float64).scatter_reduce(0, b.group, ends.amax(0), "amin")
        if bool((low <= high * (1 + 2 * EPSILON)).all()):
            fits[rule] = (low + high) / 2
    if len(fits) != 1:
        return None
    rule, inverse = next(iter(fits.items()))
    limit = (inverse[batch.group] * batch.absmax)[torch.isfinite(inverse[batch.group])].median()
    step = Step(f"absmax/{limit:.5g} (fitted)", float(limit), lambda absmax, returned: absmax / limit)
    text = f"codes fit {step.name} in each group, neither absmax/{grid.limit:g} nor the returned scale"
    return Decision(rule, Hypothesis(step, None, rule, epsilon=1e-3), evidence=text)


def _spread(batch: Batch, grid: Grid, hypothesis: Hypothesis) -> str:
    """How codes lie about s, where some that should round down go up and some that should go up do not."""
    keep = usable(batch, grid, hypothesis)
    p = grid.position(hypothesis.scaled(batch))[keep]
    outside = (batch.index[keep] - p).abs() >= 1
    fraction = p - p.floor()
    up = batch.index[keep] > p
    low, high = up[(fraction > 0.05) & (fraction < 0.35)].double(), up[(fraction > 0.65) & (fraction < 0.95)].double()
    if len(low) == 0 or len(high) == 0 or not (0.05 < float(low.mean()) < float(high.mean()) < 0.95):
        return ""
    return (
        f"looks stochastic: fractions near 0.2 go up in {float(low.mean()):.0%}, near 0.8 in {float(high.mean()):.0%}; "
        f"{float(outside.double().mean()):.1%} of the codes are a whole step or more away"
    )


def _log_likelihood(batch: Batch, grid: Grid, step: Step) -> float:
    """Of the codes under stochastic rounding with this step."""
    p = grid.position(batch.x / step.of(batch.absmax, batch.returned))
    fraction = p - p.floor()
    chance = torch.where(batch.index > p.floor(), fraction, 1 - fraction)
    return float(torch.log(chance[torch.isfinite(p)].clamp(min=1e-9)).mean())


def _is_stochastic(batch: Batch, grid: Grid, step: Step) -> bool:
    """Codes are floor or ceil of s, and go up with a frequency equal to the fraction, in every tenth of it."""
    p = grid.position(batch.x / step.of(batch.absmax, batch.returned))
    fraction = p - p.floor()
    keep = torch.isfinite(p) & (p.abs() < grid.hi - 1) & (fraction > 1e-3) & (fraction < 1 - 1e-3)
    up, fraction = (batch.index - p.floor())[keep], fraction[keep]
    if len(up) < 500 or not bool(((up == 0) | (up == 1)).all()):
        return False
    tenth = (fraction * 10).long().clamp(0, 9)
    for i in range(10):
        here = tenth == i
        if not bool(here.any()):
            continue
        gap = float((up[here] - fraction[here]).sum().abs())
        sigma = float((fraction[here] * (1 - fraction[here])).sum().sqrt())
        if gap > max(6 * sigma, _BIN_SLACK * int(here.sum())):
            return False
    return True
