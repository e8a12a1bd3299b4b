"""The tables that the studies leave in a run's folder, column by column; see `tables` for how they are read.

ablation.csv, theory.csv, attention.csv, propagation.csv, closed_loop_frames.parquet, closed_loop_statistics.parquet,
closed_loop.csv. Provenance: ablation.json, propagation.json, closed_loop.json. codes.parquet belongs to the run itself:
its run id and provenance are run.json's.
"""

from __future__ import annotations

from analysis.results.schema import Column
from analysis.results.tables import Table


def _c(name: str, dtype: str, role: str, meaning: str, unit: str = "") -> Column:
    return Column(name, dtype, unit, meaning, role)


def _ends(of: str) -> tuple[Column, Column]:
    return (
        _c(f"{of}_lo", "float64", "interval", f"lower end of the 95 % interval of {of}"),
        _c(f"{of}_hi", "float64", "interval", f"upper end of the 95 % interval of {of}"),
    )


_SITE = (
    _c("block", "Int64", "label", "transformer block, from 0; -1 unknown"),
    _c("attention", "string", "label", "self or cross"),
    _c("projection", "string", "label", "q, k, v or o"),
)

ABLATION = Table(
    "ablation.csv",
    1,
    "one row = one named change to one stage, one rounding, one group of sites",
    "shrinkage ablate",
    (
        _c("factor", "string", "key", "what is changed; 'rounding x FACTOR' for an interaction"),
        _c("level", "string", "key", "what it is changed to"),
        _c("rounding", "string", "key", "shipped or fixed; shipped/fixed for an interaction"),
        _c("site", "string", "key", "'all', or attention and projection: 'self q'"),
        _c("stage", "string", "label", "the stage that changes"),
        _c("layers", "Int64", "label", "layers in the mean"),
        _c("calls", "Int64", "label", "forward passes measured"),
        _c("rows", "Int64", "label", "rows (tokens) measured, over calls, per layer at most"),
        _c("mean_rel_mse", "float64", "metric", "plain mean over layers of rel_mse with the change"),
        _c("baseline", "float64", "metric", "the same without the change"),
        _c("change", "float64", "metric", "mean_rel_mse / baseline - 1; interaction: ratio of the ratios - 1"),
        *_ends("change"),
        _c("verdict", "string", "label", "is |change| < 2 %: supported, rejected or undecided"),
    ),
)

THEORY = Table(
    "theory.csv",
    1,
    "one row = one layer and rounding: closed forms beside measurements, and where the error comes from",
    "shrinkage ablate",
    (
        _c("layer", "string", "key", "module path of the layer"),
        _c("rounding", "string", "key", "shipped or fixed"),
        *_SITE,
        _c("calls", "Int64", "label", "forward passes measured"),
        _c("rows", "Int64", "label", "rows (tokens) measured"),
        _c("rel_mse", "float64", "metric", "measured, as in per_layer.csv but on the sampled rows"),
        _c("predicted_rel_mse", "float64", "metric", "from second moments of the input and W; no quantiser is run"),
        _c("residual", "float64", "metric", "log2(rel_mse / predicted_rel_mse)"),
        _c("error_output_cosine", "float64", "metric", "measured"),
        _c("predicted_cosine", "float64", "metric", "from the same second moments"),
        _c("input_cosine", "float64", "metric", "closed form at the input, (-sqrt(3)/2) E|x| / rms(x); fixed: 0"),
        _c("crest", "float64", "metric", "mean over rows of absmax / rms"),
        _c("mean_abs_over_rms", "float64", "metric", "E|x| / rms(x), rows weighted by their step squared"),
        _c(
            "amplification", "float64", "metric", "gain of W along sign(x) over its mean gain, in energy; 1 = isotropic"
        ),
        _c("bias", "float64", "metric", "share of sum_ee: W (-step/2 sign x), the rounding bias"),
        _c("noise", "float64", "metric", "share of sum_ee: the rest of the activation's rounding error"),
        _c("weight", "float64", "metric", "share of sum_ee: (quantised W - W) x"),
        _c("output", "float64", "metric", "share of sum_ee: bf16 rounding of output and reference"),
        _c("bias_x_noise", "float64", "metric", "share of sum_ee: twice the inner product of the two parts"),
        _c("bias_x_weight", "float64", "metric", "share of sum_ee: as above"),
        _c("bias_x_output", "float64", "metric", "share of sum_ee: as above"),
        _c("noise_x_weight", "float64", "metric", "share of sum_ee: as above"),
        _c("noise_x_output", "float64", "metric", "share of sum_ee: as above"),
        _c("weight_x_output", "float64", "metric", "share of sum_ee: as above"),
        _c("closure", "float64", "metric", "sum of the ten shares - 1; the decomposition is exact up to this"),
    ),
)

ATTENTION = Table(
    "attention.csv",
    1,
    "one row = one attention, what of it is quantised, one kernel, one head ('all' = every head)",
    "shrinkage propagate",
    (
        _c("layer", "string", "key", "module path of the attention"),
        _c("quantised", "string", "key", "qk or v"),
        _c("variant", "string", "key", "quantiser"),
        _c("head", "string", "key", "head from 0, or all"),
        _c("block", "Int64", "label", "transformer block, from 0; -1 unknown"),
        _c("attention", "string", "label", "self or cross"),
        _c("calls", "Int64", "label", "forward passes measured"),
        _c("rel_mse", "float64", "metric", "relative MSE of what enters o: softmax(q k) v, as the model computes it"),
        _c("rel_mse_norm_frozen", "float64", "metric", "the same if the norms kept the bf16 scale; empty for v"),
        _c("cancelled", "float64", "metric", "1 - rel_mse / rel_mse_norm_frozen: what the norms take away"),
        _c("shrinkage", "float64", "metric", "fraction of its magnitude that this tensor loses"),
    ),
)

PROPAGATION = Table(
    "propagation.csv",
    1,
    "one row = one kernel, what is quantised, where the error is seen, one denoising step ('all' = every step)",
    "shrinkage propagate",
    (
        _c("variant", "string", "key", "quantiser, or fp32: the model without bf16 linears"),
        _c("quantised", "string", "key", "all, or the number of the only block that is quantised"),
        _c("seen_at", "string", "key", "number of the block whose output is compared, or output: the model's"),
        _c("step", "string", "key", "denoising step from 0, or all"),
        _c("calls", "Int64", "label", "forward passes measured"),
        _c("sum_yy", "float64", "sum", "sum of y^2, y = the bf16 model's value on the same inputs"),
        _c("sum_ee", "float64", "sum", "sum of e^2"),
        _c("sum_ey", "float64", "sum", "sum of e*y"),
        _c("rel_mse", "float64", "metric", "sum_ee / sum_yy"),
        *_ends("rel_mse"),
        _c("error_output_cosine", "float64", "metric", "sum_ey / sqrt(sum_ee * sum_yy)"),
        _c("shrinkage", "float64", "metric", "-sum_ey / sum_yy"),
        *_ends("shrinkage"),
    ),
)

_FRAME = (
    _c("scene", "string", "key", "scene, or name of the video file"),
    _c("seed", "Int64", "key", "seed of the sampling noise; -1 where there is none"),
    _c("frame", "Int64", "key", "frame of the rollout, from 0"),
    _c("clip", "Int64", "label", "clip of the rollout, from 0"),
)
CLOSED_LOOP_FRAMES = Table(
    "closed_loop_frames.parquet",
    1,
    "one row = one frame of one rollout, compared with another video",
    "shrinkage rollout",
    (
        _c("variant", "string", "key", "fp32, bf16, a quantiser, or other_seed: bf16 with another seed's noise"),
        _c("against", "string", "key", "true: the game's frames; bf16: the bf16 rollout of this scene and seed"),
        *_FRAME,
        _c("mse", "float64", "metric", "mean squared error over pixels and channels", "8-bit steps^2"),
        _c("psnr_db", "float64", "metric", "from mse; capped at 60 dB, equal frames included", "dB"),
        _c("ssim", "float64", "metric", "structural similarity, mean of three channels"),
        _c("flip", "float64", "metric", "mean FLIP, 0 = equal; empty on frames that were not scored"),
    ),
)
CLOSED_LOOP_STATISTICS = Table(
    "closed_loop_statistics.parquet",
    1,
    "one row = one frame of one rollout by itself",
    "shrinkage rollout",
    (
        _c("variant", "string", "key", "as in closed_loop_frames, or true: the game's frames"),
        *_FRAME,
        _c("luminance", "float64", "metric", "mean BT.709 luma of the coded values, 0 to 1"),
        _c("contrast", "float64", "metric", "standard deviation of that luma"),
        _c("high_frequency", "float64", "metric", "share of its variance above 0.25 cycles a pixel; empty if constant"),
    ),
)
CLOSED_LOOP = Table(
    "closed_loop.csv",
    1,
    "one row = one kernel, one question, one metric, one part of the rollout: paired difference, tests and verdict",
    "shrinkage rollout",
    (
        _c("variant", "string", "key", "quantiser (or fp32)"),
        _c("against", "string", "key", "true, bf16 or nothing (statistics of the frames by themselves)"),
        _c("baseline", "string", "key", "what the variant is set against: bf16, other_seed or fp32"),
        _c("metric", "string", "key", "psnr_db, ssim, flip, luminance, contrast or high_frequency"),
        _c("window", "string", "key", "all clips, or last_quarter of them"),
        _c("scenes", "Int64", "label", "scenes: the unit of every test; seeds are averaged within a scene"),
        _c("pairs", "Int64", "label", "scene-seed pairs"),
        _c("value", "float64", "metric", "mean of the variant"),
        _c("baseline_value", "float64", "metric", "mean of the baseline"),
        _c("difference", "float64", "metric", "value - baseline_value, paired; positive is larger, not better"),
        *_ends("difference"),
        _c("p_value", "float64", "metric", "paired t test of difference = 0, two-sided, over scenes"),
        _c("p_wilcoxon", "float64", "metric", "Wilcoxon's signed-rank test of the same; empty below 6 scenes"),
        _c("margin", "float64", "label", "margin of the equivalence test, in the metric's unit; empty: not tested"),
        _c("p_equivalence", "float64", "metric", "p of the equivalence test at that margin"),
        _c("verdict", "string", "label", "equivalent, degraded or undecided; empty: not tested"),
    ),
)

CODES = Table(
    "codes.parquet",
    1,
    "one row = one activation code that occurs, of one layer and kernel; counted in every 7th forward pass, "
    "on at most 128 evenly spaced rows of each input",
    "shrinkage measure",
    (
        _c("layer", "string", "key", "module path of the layer"),
        _c("variant", "string", "key", "quantiser"),
        _c("tokens", "string", "key", "all, or valid: without padding"),
        _c("code", "Int64", "key", "-128 .. 127; a code that does not occur has no row"),
        _c("count", "Int64", "sum", "how often it occurs; rows with NaN or Inf do not count", "codes"),
    ),
)

TABLES = (ABLATION, THEORY, ATTENTION, PROPAGATION, CLOSED_LOOP, CLOSED_LOOP_FRAMES, CLOSED_LOOP_STATISTICS, CODES)
