"""Runs drawn with a seed, for tests: tables as a real run leaves them, with errors that obey Cauchy-Schwarz.

The defaults behave as issue #90 says; `ratio=1, cosine=0` is the world in which the defect does not exist.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.results import schema, summary

SITES = [(attention, projection) for attention in ("self", "cross") for projection in "qkvo"]


def make_calls(
    layers: int = 64,
    calls: int = 6,
    *,
    variants: tuple[str, ...] = ("shipped", "fixed"),
    ratio: float = 4.8,
    cosine: float = -0.73,
    fixed_mse: float = 6.4e-4,
    labelled: bool = True,
    seed: int = 90,
    prefix: str = "",
    run_id: str = "0123456789ab",
) -> pd.DataFrame:
    """A per_call frame. `ratio`: shipped/fixed MSE; `cosine`: of the shipped error; `labelled=False`: block -1."""
    rng = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    for index in range(layers):
        attention, projection = SITES[index % 8]
        depth, k = index // 8, 256
        base = fixed_mse * np.exp(0.25 * rng.standard_normal() + 0.3 * (projection == "o") + 0.02 * depth)
        tilt = 0.06 * np.cos(index % 8) + 0.02 * rng.standard_normal()
        layer_ratio = ratio * np.exp(0.12 * rng.standard_normal())
        for call in range(calls):
            noise = np.exp(0.06 * rng.standard_normal(2))
            yy = 512 * k * noise[0]
            for variant in variants:
                shipped = variant == "shipped"
                ee = base * (layer_ratio if shipped else 1.0) * noise[1] * yy
                cos = float(np.clip((cosine + tilt if shipped else 0.0) + 0.01 * rng.standard_normal(), -1, 1))
                ey = cos * np.sqrt(ee * yy)
                rows.append(
                    {
                        "schema_version": schema.SCHEMA_VERSION,
                        "run_id": run_id,
                        "layer": f"{prefix}blocks.{depth}.{attention}_attn.{projection}",
                        "variant": variant,
                        "reference": "bf16",
                        "tokens": "all",
                        "call": call,
                        "scene": "corridor",
                        "clip": call // 3,
                        "step": call % 3,
                        "block": depth if labelled else -1,
                        "attention": attention if labelled else "",
                        "projection": projection if labelled else "",
                        "in_features": k,
                        "out_features": k,
                        "rows": 512,
                        "nonfinite_rows": 0,
                        "zero_rows": 2,
                        "sum_yy": yy,
                        "sum_ee": ee,
                        "sum_ey": ey,
                        "sum_zz": 0.97 * yy,
                        "sum_ez": 0.97 * ey,
                        "sum_eff_yy": yy,
                        "sum_eff_ee": ee * (0.45 if shipped and projection in "qk" else 1.0),
                        "max_abs_e": 0.2 * noise[1],
                        "sum_magnitude_error": -0.5 * 512 * k if shipped else 0.0,
                        "sum_square_error": 512 * k / (3 if shipped else 12),
                        "mismatched": 512 * k // 2 if shipped else 0,
                        "zeroed": 900 if shipped else 450,
                        "saturated": 100 if shipped else 510,
                        "sum_crest": 510 * 4.2,
                    }
                )
    return schema.conform(pd.DataFrame(rows), schema.PER_CALL_COLUMNS, "synthetic")


def make_run(folder: Path, layers: int = 64, calls: int = 6, *, world: str = "synthetic", **options: Any) -> Path:
    """A run folder. `info` replaces keys of run.json; every other option goes to make_calls."""
    info = options.pop("info", {})
    per_call = make_calls(layers, calls, **options)
    folder.mkdir(parents=True, exist_ok=True)
    schema.write_per_call(per_call, folder / schema.PER_CALL)
    schema.write_per_layer(summary.summarize(per_call, world), folder / schema.PER_LAYER)
    run = {
        "schema_version": schema.SCHEMA_VERSION,
        "run_id": str(per_call["run_id"].iloc[0]),
        "world": world,
        "complete": True,
        "checkpoint_sha256": "ab" * 32,
        "scenes": ["corridor", "hall"],
        "clips": 2,
        "seed": 0,
        "variants": {"shipped": "cd" * 32, "fixed": "ef" * 32},
        "reference": "bf16",
        "tokens": "all",
        "engine": "reference",
        "device": "cpu",
        "versions": {"python": "3.11.4", "torch": "2.13.0", "triton": "3.9.0", "cuda": None, "numpy": "2.4.6"},
        "git_commit": "0" * 40,
        "command": "shrinkage measure --world synthetic --out run",
        "layers_expected": layers,
        "layers_found": layers,
        "layers_silent": [],
        "nonfinite_rows": 0,
        "calls": calls,
        "timing": {"started": "2026-01-01T00:00:00Z", "wall_s": 12.5},
    }
    schema.write_run(run | info, folder / schema.RUN)
    return folder
