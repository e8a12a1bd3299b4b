"""The tables of the studies, drawn with a seed, as the commands leave them in a run's folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from analysis.results import ablation, closed_loop, propagation, studies, tables, theory

SITES = [f"{a} {p}" for a in ("self", "cross") for p in "qkvo"]
CHANGES = (
    ("none", "baseline", "none", 1.0, 1.0),
    ("accumulation", "fp32", "product", 1.0, 1.0),
    ("weight_scale", "bf16", "weight scales", 1.011, 1.024),
    ("activation_granularity", "tensor", "activation scales", 2.7, 2.5),
    ("weight_granularity", "tensor", "weight scales", 1.14, 1.97),
    ("rounding", "half_even", "activation codes", 0.16, 1.0),
    ("only", "activation", "operands", 0.95, 0.66),
)


def ablation_table(calls: int = 5, factor: float = 1.0) -> pd.DataFrame:
    """`factor` multiplies the error of every change that the issue names."""
    rng = np.random.default_rng(1)
    names = {"accumulation", "weight_scale", "activation_granularity", "weight_granularity"}
    cells, gains = [], []
    for offset, rounding in enumerate(("shipped", "fixed")):
        for place, (name, level, stage, *gain) in enumerate(CHANGES):
            at = offset * len(CHANGES) + place
            cells.append(ablation.Cell(name, level, stage, rounding, at, offset * len(CHANGES)))
            base = 6e-4 if rounding == "shipped" else 1e-4
            gains.append(base * (gain[offset] * factor if name in names and factor != 1 else gain[offset]))
    yy = np.exp(0.1 * rng.standard_normal((calls, len(SITES), 1))) * np.ones(len(cells))
    noise = np.exp(0.05 * rng.standard_normal((calls, len(SITES), 1)))
    return ablation.table(ablation.Sums(yy * noise * gains, yy, SITES, 100 * calls), cells)


def theory_table(calls: int = 2) -> pd.DataFrame:
    rng = np.random.default_rng(2)
    names = [
        "rows",
        "sum_crest",
        "step2",
        "step_abs",
        "xx",
        "features",
        "direction",
        "gain",
        "sum_yy",
        "sum_ee",
        "sum_ey",
    ]
    names += ["predicted_yy", "predicted_ee", "predicted_ey", *theory.names_of_shares()]
    sums = np.zeros((calls, len(SITES), 2, len(names)))
    for layer in range(len(SITES)):
        for kernel in range(2):
            parts = {"bias": 0.75 * (kernel == 0), "noise": 0.15, "weight": 0.06, "output": 0.03}
            ee = sum(parts.values())
            gain = 1 + 0.3 * rng.random()
            values = {"rows": 32, "sum_crest": 32 * 4, "step2": 32e-4, "step_abs": 32 * 48 * 0.01 * 0.8, "xx": 32 * 48}
            values |= {"features": 32 * 48, "direction": gain, "gain": 1, "sum_yy": 1e3, "sum_ee": ee}
            values |= {"sum_ey": -0.7 * np.sqrt(ee * 1e3) * (kernel == 0), "predicted_yy": 1e3}
            values |= {"predicted_ee": ee * (1 + 0.05 * rng.standard_normal())} | parts
            values["predicted_ey"] = values["sum_ey"]
            sums[:, layer, kernel] = [values.get(name, 0.0) for name in names]
    layers = pd.DataFrame(
        [
            {"layer": f"blocks.0.{a}_attn.{p}", "block": 0, "attention": a, "projection": p}
            for a, p in (site.split() for site in SITES)
        ]
    )
    return theory.table(layers, sums, names, ("shipped", "fixed"))


def propagation_table(blocks: int = 3) -> pd.DataFrame:
    rng = np.random.default_rng(3)
    rows = []
    for call in range(6):
        for variant, size in (("fp32", 1e-6), ("shipped", 4e-4), ("fixed", 5e-5)):
            places = [*map(str, range(blocks)), "output"]
            alone = [] if variant == "fp32" else [(str(b), at) for b in range(blocks) for at in (str(b), "output")]
            for quantised, seen_at in [*(("all", p) for p in places), *alone]:
                ee = size * (places.index(seen_at) + 1) * np.exp(0.1 * rng.standard_normal())
                ee *= 1.0 if quantised == "all" else 0.4
                row = {"call": call, "step": call % 3, "variant": variant, "quantised": quantised, "seen_at": seen_at}
                rows.append(row | {"sum_yy": 1.0, "sum_ee": ee, "sum_ey": -0.5 * np.sqrt(ee) * (variant == "shipped")})
    return propagation.table(pd.DataFrame(rows))


def attention_table(blocks: int = 3) -> pd.DataFrame:
    rows = []
    for block in range(blocks):
        for attention in ("self", "cross"):
            for variant, size in (("shipped", 4e-4), ("fixed", 5e-5)):
                for quantised in ("qk", "v"):
                    for head in range(2):
                        label = {"call": 0, "layer": f"blocks.{block}.{attention}_attn", "block": block}
                        label |= {"attention": attention, "quantised": quantised, "variant": variant, "head": str(head)}
                        qk = quantised == "qk"
                        sums = {"sum_yy": 1.0, "sum_ee": size * (0.3 if qk else 1), "sum_ey": -0.01}
                        rows.append(label | sums | {"frozen_ee": size * 2 if qk else None})
    return propagation.attention_table(pd.DataFrame(rows))


def closed_loop_tables(scenes: int = 4, clips: int = 4, loss: float = 0.05) -> tuple[pd.DataFrame, pd.DataFrame]:
    """`loss`: dB that the shipped kernel loses against the game's frames."""
    rng = np.random.default_rng(4)
    levels = {
        ("bf16", "true"): 17.0, ("fp32", "true"): 17.0, ("shipped", "true"): 17.0 - loss, ("fixed", "true"): 17.0,
        ("fp32", "bf16"): 58.0, ("shipped", "bf16"): 38.0, ("fixed", "bf16"): 48.0, ("other_seed", "bf16"): 24.0,
    }  # fmt: skip
    frames, looks = [], []
    for scene in range(scenes):
        level = rng.normal()
        for frame in range(4 * clips):
            label = {"scene": f"heldout-{scene:02d}", "seed": 0, "frame": frame, "clip": frame // 4}
            for (variant, against), psnr in levels.items():
                value = psnr + level - 0.1 * frame + 0.05 * rng.normal()
                scores = {
                    "mse": 255**2 / 10 ** (value / 10),
                    "psnr_db": value,
                    "ssim": value / 60,
                    "flip": 0.3 - value / 300,
                }
                frames.append({"variant": variant, "against": against} | label | scores)
            for variant in ("bf16", "fp32", "shipped", "fixed", "true"):
                look = {"luminance": 0.33 + 0.001 * rng.normal(), "contrast": 0.08, "high_frequency": 0.027}
                looks.append({"variant": variant} | label | {"seed": -1 if variant == "true" else 0} | look)
    return pd.DataFrame(frames), pd.DataFrame(looks)


def add_studies(folder: Path) -> Path:
    """Every study's tables, into a run's folder."""
    frames, looks = closed_loop_tables()
    for table, frame in (
        (studies.ABLATION, ablation_table()),
        (studies.THEORY, theory_table()),
        (studies.PROPAGATION, propagation_table()),
        (studies.ATTENTION, attention_table()),
        (studies.CLOSED_LOOP_FRAMES, frames),
        (studies.CLOSED_LOOP_STATISTICS, looks),
        (studies.CLOSED_LOOP, closed_loop.summarize(frames, looks)),
    ):
        tables.write(table, frame, folder, "0123456789ab")
    return folder
