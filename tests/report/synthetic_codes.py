"""codes.parquet for a run's folder: codes of Laplace-distributed inputs, truncated and rounded, drawn with a seed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from analysis.results import codes, schema, studies, tables


def add_codes(folder: Path, drawn: int = 20_000) -> pd.DataFrame:
    """Counts for every layer and kernel of the run's per_layer.csv; any kernel but shipped rounds."""
    per_layer = schema.read_per_layer(folder / schema.PER_LAYER)
    rng = np.random.default_rng(3)
    variants = list(dict.fromkeys(per_layer["variant"]))
    counts = {}
    for layer in dict.fromkeys(per_layer["layer"]):
        s = np.clip(rng.laplace(scale=rng.uniform(4, 30), size=drawn), -127, 127)
        held = [np.trunc(s) if v == "shipped" else np.rint(s) for v in variants]
        found = [np.bincount(h.astype(np.int64) - codes.LOWEST, minlength=codes.BINS) for h in held]
        counts[layer] = np.stack([np.stack([one, np.zeros_like(one)]) for one in found])
    table = codes.frame(counts, variants, ["all"])
    return tables.write(studies.CODES, table, folder, str(per_layer["run_id"].iloc[0]))
