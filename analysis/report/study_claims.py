"""Claims C6 to C8 against a run's studies and the project's records: (value here, verdict, note) as `claims` has them.

judge_factors(tables.find(studies.ABLATION, run.path))
judge_closed_loop(*records.closed_loops(world, run.path))
judge_cost(records.quantizers(), evidence.mean("rel_mse", "shipped/fixed"))
with_studies(claims.judge(evidence), evidence, run.path)      # the claims table with the three in their places
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.report import records, text
from analysis.report.claims import Estimate, Evidence, Finding, Verdict
from analysis.report.records import ClosedLoop
from analysis.results import studies, tables
from analysis.results.ablation import REJECTED, SUPPORTED
from analysis.results.closed_loop import DEGRADED, EQUIVALENT

Judged = tuple[str, Verdict, str]
FACTORS_RULE = (
    "In kind: for the shipped kernel every change that the issue names (fp32 accumulation, bf16 weight scales, one "
    "scale per tensor for activations or weights) moves the mean relative MSE by less than 2 %, interval included."
)
CLOSED_LOOP_RULE = (
    "In kind: the shipped kernel's rollouts are equivalent to bf16's in PSNR against the game's frames, and no further "
    "from bf16's frames than another noise seed (tests at 5 % with the stated margin, paired by scene). Not reproduced "
    "where one of them is degraded. Judged on the project's record where that is of this world and of more pairs."
)
FREE = 1.01  # times of an int8 layer, fixed over shipped, up to which the fix counts as free
COST_RULE = (
    "In kind: the interval of the ratio of errors (C3) lies above 1, and an int8 layer (quantiser and product) with "
    f"the fixed quantiser takes at most {FREE:g} times as long as with the shipped one, its 95 % interval included, at "
    "every shape of the record. Not reproduced: the interval of the ratio of errors reaches 1, or that of the times "
    f"lies above {FREE:g} at some shape. Undecided: anything else."
)
NAMES = {
    ("accumulation", "fp32"): "codes summed in fp32",
    ("accumulation", "dequantised fp32"): "operands scaled first, summed in fp32",
    ("weight_scale", "bf16"): "weight scales in bf16",
    ("weight_scale", "fp16"): "weight scales in fp16",
    ("activation_scale", "bf16"): "activation scales in bf16",
    ("activation_granularity", "tensor"): "activations: one scale per tensor",
    ("activation_granularity", "group128"): "activations: one scale per 128 features",
    ("weight_granularity", "tensor"): "weights: one scale per tensor",
    ("only", "activation"): "only activations quantised",
    ("only", "weight"): "only weights quantised",
    ("only", "bf16 output"): "nothing quantised, output rounded twice",
    ("output", "fp32"): "output in fp32",
}
IN_ISSUE = (  # what the issue names, as changes: int32 accumulation, bf16 weight scales, granularity
    ("accumulation", "fp32"),
    ("weight_scale", "bf16"),
    ("activation_granularity", "tensor"),
    ("weight_granularity", "tensor"),
)


def name_of(factor: str, level: str) -> str:
    """A change in words."""
    return f"rounding: {level}" if factor == "rounding" else NAMES.get((factor, level), f"{factor}: {level}")


def overall(ablation: pd.DataFrame, rounding: str) -> pd.DataFrame:
    """The changes of one rounding over all sites, without the control, the rounding itself and interactions."""
    kept = (ablation["site"] == "all") & (ablation["rounding"] == rounding)
    return ablation[kept & ~ablation["factor"].isin(["none", "rounding"])].reset_index(drop=True)


def judge_factors(ablation: pd.DataFrame | None) -> Judged:
    """C6, by FACTORS_RULE."""
    if ablation is None:
        return text.EMPTY, Verdict.UNMEASURED, "the run has no ablation: shrinkage ablate"
    rows = overall(ablation, "shipped").set_index(["factor", "level"])
    named = [rows.loc[key] for key in IN_ISSUE if key in rows.index]
    value = "; ".join(f"{name_of(*row.name)} {change_percent(row['change'])}" for row in named)
    verdicts = [row["verdict"] for row in named]
    note = "shipped kernel, against per-token and per-channel scales in fp32 and int32 accumulation"
    if REJECTED in verdicts:
        held = [name_of(*row.name) for row in named if row["verdict"] == SUPPORTED]
        note += f"; below 2 %: {', '.join(held) or 'none'}"
        return value, Verdict.NOT, note
    if not named or set(verdicts) != {SUPPORTED}:
        return value or text.EMPTY, Verdict.UNDECIDED, "intervals reach across 2 %, or too few calls"
    return value, Verdict.KIND, note


def change_percent(change: float, lo: float = np.nan, hi: float = np.nan) -> str:
    """'+2.4 %', with its interval where there is one."""
    ends = "" if np.isnan(lo) else f" [{text.signed(f'{100 * lo:+.1f}')}, {text.signed(f'{100 * hi:+.1f}')}]"
    return f"{text.signed(f'{100 * change:+.1f}')}{ends} %"


def question(
    table: pd.DataFrame, variant: str, against: str, baseline: str, metric: str = "psnr_db"
) -> pd.Series | None:
    """The row of closed_loop.csv over all clips that answers a question; None where it was not asked."""
    asked = (table["against"] == against) & (table["baseline"] == baseline) & (table["metric"] == metric)
    rows = table[asked & (table["variant"] == variant) & (table["window"] == "all")]
    return None if rows.empty else rows.iloc[0]


def decibels(row: pd.Series) -> str:
    """'−0.08 [−0.34, 0.17] dB'."""
    shown = text.signed(f"{row['difference']:+.2f}")
    if not np.isnan(row["difference_lo"]):
        shown += f" [{', '.join(text.signed(f'{row[end]:.2f}') for end in ('difference_lo', 'difference_hi'))}]"
    return f"{shown} dB"


def judge_closed_loop(own: ClosedLoop | None, record: ClosedLoop | None = None) -> Judged:
    """C7, by CLOSED_LOOP_RULE: on the record where there is one, else on the run's own closed loop."""
    loop = record or own
    if loop is None:
        return text.EMPTY, Verdict.UNMEASURED, "the run has no closed loop: shrinkage rollout"
    game = question(loop.table, "shipped", "true", "bf16")
    seed = question(loop.table, "shipped", "bf16", "other_seed")
    if game is None or seed is None:
        return text.EMPTY, Verdict.UNMEASURED, "needs the shipped kernel, the game's frames and another seed"
    value = f"against the game {decibels(game)} from bf16's PSNR: {game['verdict']}"
    note = f"{'record: ' if record else ''}{loop.described}, {int(game['scenes'])} scenes, "
    note += f"margin {game['margin']:g} dB; to bf16's frames "
    note += f"{decibels(seed)} " + ("nearer than" if seed["difference"] > 0 else "compared with") + " another seed"
    rounding = question(loop.table, "shipped", "bf16", "fp32")
    if rounding is not None:
        note += f", and {decibels(rounding)} compared with bf16's own rounding: {_measurable(rounding)}"
    mine = None if record is None or own is None else question(own.table, "shipped", "true", "bf16")
    if mine is not None and own is not None:
        note += f"; this run: {own.described}, {decibels(mine)} against the game: {mine['verdict']}"
    verdicts = {game["verdict"], seed["verdict"]}
    if DEGRADED in verdicts:
        return value, Verdict.NOT, note
    return value, Verdict.KIND if verdicts == {EQUIVALENT} else Verdict.UNDECIDED, note


def _measurable(row: pd.Series) -> str:
    return "the error is measurable in the frames" if row["verdict"] == DEGRADED else "not distinguishable from it"


def layer_ratio(shape: dict[str, Any], kernel: str = "fixed") -> dict[str, float]:
    """Time of a quantiser and its int8 product over that of shipped's: median, low and high.

    The product takes the same time after either, so the interval is the quantisers', by their share of the layer.
    """
    shipped = shape["times"]["shipped"]["median_s"]
    share = shipped / (shipped + shape["int8_linear_s"])
    ratio = shape["ratio_to_shipped"][kernel]
    return {end: 1 + (ratio[end] - 1) * share for end in ("median", "low", "high")}


def cost_of(shape: dict[str, Any]) -> Verdict:
    """Is the fix free at one shape of a record? By the interval of the layer's times, fixed / shipped."""
    ratio = layer_ratio(shape)
    return Verdict.KIND if ratio["high"] <= FREE else Verdict.NOT if ratio["low"] > FREE else Verdict.UNDECIDED


def times_ratio(ratio: dict[str, float]) -> str:
    """'1.012 [1.007, 1.019]'."""
    return f"{ratio['median']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"


def times_range(record: dict[str, Any], kernel: str = "fixed") -> str:
    """Medians of a quantiser's time over that of shipped, least and most: '0.991 … 1.108'."""
    found = [shape["ratio_to_shipped"][kernel]["median"] for shape in record["shapes"]]
    return f"{min(found):.3f} … {max(found):.3f}"


def shape_name(shape: dict[str, Any]) -> str:
    """'4400 × 3072 bfloat16'."""
    return f"{shape['rows']} × {shape['features']} {shape['dtype']}"


def judge_cost(record: dict[str, Any] | None, errors: Estimate) -> Judged:
    """C8, by COST_RULE. `errors`: the ratio of the two kernels' errors, shipped / fixed."""
    if record is None:
        return text.EMPTY, Verdict.UNMEASURED, "error: see C3; cost: no record of the quantisers' times"
    shapes = record["shapes"]
    worst = []
    for dtype in dict.fromkeys(shape["dtype"] for shape in shapes):
        ratios = [layer_ratio(shape) for shape in shapes if shape["dtype"] == dtype]
        worst.append(f"{times_ratio(max(ratios, key=lambda ratio: ratio['median']))} in {dtype}")
    value = f"time of an int8 layer, fixed / shipped, slowest shape: {'; '.join(worst)}"
    verdicts = [cost_of(shape) for shape in shapes]
    note = f"record of {len(shapes)} shapes, {record['what']} on {record['device']} "
    note += f"({records.QUANTIZERS_PLACE}/{records.QUANTIZERS})"
    for verdict, said in ((Verdict.NOT, f"slower than {FREE:g}"), (Verdict.UNDECIDED, f"undecided at {FREE:g}")):
        named = [shape_name(s) for s, found in zip(shapes, verdicts, strict=True) if found is verdict]
        note += f"; {said}: {', '.join(named)}" if named else ""
    note += f"; the quantiser alone {times_range(record)} times"
    if np.isnan(errors.low):
        return value, Verdict.UNMEASURED, f"{note}; error: no interval of the ratio in this run"
    note += f"; the error falls {text.plain(errors.value, errors.low, errors.high)} times"
    if errors.low <= 1 or Verdict.NOT in verdicts:
        return value, Verdict.NOT, note
    return value, Verdict.UNDECIDED if Verdict.UNDECIDED in verdicts else Verdict.KIND, note


def with_studies(findings: list[Finding], evidence: Evidence, folder: Path) -> list[Finding]:
    """The findings with C6 to C8 judged by the studies that the folder holds and by the records; others as they are."""
    judged = {
        "C6": (FACTORS_RULE, judge_factors(tables.find(studies.ABLATION, folder))),
        "C7": (CLOSED_LOOP_RULE, judge_closed_loop(*records.closed_loops(evidence.world, folder))),
        "C8": (COST_RULE, judge_cost(records.quantizers(), evidence.mean("rel_mse", "shipped/fixed"))),
    }
    out = []
    for finding in findings:
        rule, found = judged.get(finding.claim.id, ("", None))
        made = None if found is None else Finding(replace(finding.claim, rule=rule), *found)
        out.append(made or finding)
    return out
