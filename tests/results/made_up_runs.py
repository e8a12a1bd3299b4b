"""Makes many runs' folders of made-up sums, fast: for the tests of `shrinkage merge`, and for timing it at size.

    python tests/results/made_up_runs.py FOLDER --runs 1000            # 240 layers x 36 calls x 2 kernels each
    /usr/bin/time -v shrinkage merge FOLDER --out MERGED               # 17 million rows

A run's sums are those of `synthetic.make_calls` times seeded factors, one a call and one a layer of a run, so that
runs differ more than calls do. per_layer.csv holds their exact sums; its intervals are made up (5 % to either side).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import pandas as pd

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT), str(ROOT / "tests" / "report")]
from synthetic import make_calls  # noqa: E402

from analysis.results import folder as run_folder  # noqa: E402
from analysis.results import provenance, schema, summary  # noqa: E402

_FLOATS = [c.name for c in schema.SUMS if c.dtype == "float64" and c.name != "max_abs_e"]
_ERRORS = {"sum_ee": 1.0, "sum_eff_ee": 1.0, "sum_ey": 0.5, "sum_ez": 0.5}  # powers: Cauchy-Schwarz goes on to hold

INFO = {
    "world": "synthetic",
    "checkpoint_sha256": "ab" * 32,
    "scenes": ["corridor", "hall"],
    "clips": 2,
    "seed": 0,
    "variants": {"shipped": "cd" * 32, "fixed": "ef" * 32},
    "reference": "bf16",
    "tokens": "all",
    "engine": "reference",
    "device": "cpu",
    "complete": True,
    "layers_expected": 8,
    "layers_silent": [],
}


def write_run(out: Path, calls: pd.DataFrame, **changes) -> Path:
    """A run's folder with these calls and INFO, changed as given; its run id follows from both."""
    info = INFO | changes
    run_folder.write_run_folder(out, calls.assign(run_id=provenance.run_id(info)).reset_index(drop=True), info)
    return out


def make_runs(folder: Path, runs: int, layers: int = 240, calls: int = 36, seed: int = 17, tables: bool = True) -> None:
    """Write `runs` folders run-0, run-1, ...; `tables`: with a per_layer.csv each."""
    base = make_calls(layers, calls).sort_values(["call", "layer", "variant"], kind="stable").reset_index(drop=True)
    cells = len(base) // calls
    rng = np.random.default_rng(seed)
    for number in range(runs):
        info = _info(number, layers, calls)
        frame = base.assign(run_id=info["run_id"])
        size = np.repeat(np.exp(0.1 * rng.standard_normal(calls)), cells)
        error = np.tile(np.exp(0.1 * rng.standard_normal(cells)), calls) * np.exp(0.03 * rng.standard_normal(len(base)))
        for name in _FLOATS:
            scale = size if name.startswith(("sum_yy", "sum_zz", "sum_eff_yy", *_ERRORS)) else 1.0
            frame[name] = frame[name].to_numpy() * scale * error ** _ERRORS.get(name, 0.0)
        out = folder / f"run-{number}"
        schema.write_per_call(frame, out / schema.PER_CALL)
        if tables:
            schema.write_per_layer(_per_layer(frame, cells, calls), out / schema.PER_LAYER)
        schema.write_run(info, out / schema.RUN)


def _info(number: int, layers: int, calls: int) -> dict:
    info = {
        "schema_version": schema.SCHEMA_VERSION,
        "world": "synthetic",
        "checkpoint_sha256": "ab" * 32,
        "scenes": ["corridor"],
        "clips": calls // 3,
        "seed": number,
        "variants": {"shipped": "cd" * 32, "fixed": "ef" * 32},
        "reference": "bf16",
        "tokens": "all",
        "engine": "reference",
        "device": "cpu",
        "complete": True,
        "layers_expected": layers,
        "layers_silent": [],
        "calls": calls,
        "command": f"shrinkage measure --world synthetic --seed {number}",
    }
    return {"run_id": provenance.run_id(info)} | info


def _per_layer(frame: pd.DataFrame, cells: int, calls: int) -> pd.DataFrame:
    """summary.summarize without the bootstrap, which would take an hour for a thousand runs."""
    table = frame.iloc[:cells].copy()
    for column in schema.SUMS:
        values = frame[column.name].to_numpy(np.float64).reshape(calls, cells)
        total = values.max(axis=0) if column.name == "max_abs_e" else values.sum(axis=0)
        table[column.name] = pd.array(total).astype(column.dtype)
    table = table.assign(calls=calls, world="synthetic", **summary.metrics(table))
    for metric in schema.INTERVAL_OF:
        spread = 0.05 * table[metric].abs()
        table[f"{metric}_lo"], table[f"{metric}_hi"] = table[metric] - spread, table[metric] + spread
    return table[[c.name for c in schema.PER_LAYER_COLUMNS]]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--layers", type=int, default=240)
    parser.add_argument("--calls", type=int, default=36)
    given = parser.parse_args()
    make_runs(given.folder, given.runs, given.layers, given.calls)
