"""Add the sums of several ranks of one run. Torch-free.

    per_call = add_runs([rank_0, rank_1], replicated={"blocks.0.cross_attn.k"})

Ranks that share one sequence (or one batch) each see a part of a call's rows: their sums add. A layer whose rows
every rank holds alike (text tokens under sequence parallelism) counts once; run.json names those as replicated.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pandas as pd

from analysis.results import schema

_KEY = ["call", "layer", "variant", "reference", "tokens"]
_ALIKE = ("block", "attention", "projection", "in_features", "out_features")


def add_runs(frames: Sequence[pd.DataFrame], replicated: Collection[str] = ()) -> pd.DataFrame:
    """Sum the per_call frames of several ranks by (call, layer, variant, reference, tokens); max_abs_e by maximum.

    The result does not depend on how rows are ordered, and float sums are taken in the order of the frames. Run id,
    scene, clip and step are those of the first frame that has the call.

    Args:
        frames: per_call tables, in rank order.
        replicated: layers that every rank measured on the same rows.

    Raises:
        ValueError: no frame, or frames that differ in layers, variants, references, tokens or a layer's shape.
    """
    if not frames:
        raise ValueError("no table to merge; name at least one run's folder")
    for rank, frame in enumerate(frames[1:], start=1):
        _check_alike(frames[0], frame, rank)
    stacked = pd.concat([frame.assign(_rank=rank) for rank, frame in enumerate(frames)], ignore_index=True)
    first = stacked.groupby(_KEY, sort=False, dropna=False)["_rank"].transform("min")
    stacked = stacked[~stacked["layer"].isin(list(replicated)) | (stacked["_rank"] == first)]
    grouped = stacked.sort_values([*_KEY, "_rank"], kind="stable").groupby(_KEY, sort=True, dropna=False)
    how = {name: ("max" if name == "max_abs_e" else "sum") for name in schema.SUM_NAMES}
    labels = [c.name for c in schema.PER_CALL_COLUMNS if c.name not in (*_KEY, *schema.SUM_NAMES)]
    merged = grouped.agg(how | dict.fromkeys(labels, "first")).reset_index()
    for name in ("layer", "variant", "tokens"):  # in the order of the first frame
        order = {value: i for i, value in enumerate(dict.fromkeys(frames[0][name]))}
        merged[f"_{name}"] = merged[name].map(order)
    merged = merged.sort_values(["call", "_layer", "_variant", "_tokens"], kind="stable")
    return schema.conform(
        merged[[c.name for c in schema.PER_CALL_COLUMNS]].reset_index(drop=True), schema.PER_CALL_COLUMNS, "merged runs"
    )


def _check_alike(first: pd.DataFrame, other: pd.DataFrame, rank: int) -> None:
    for name in ("variant", "reference", "tokens", "layer"):
        mine, theirs = set(first[name]), set(other[name])
        if mine != theirs:
            shown = [f"only rank 0: {_some(mine - theirs)}"] if mine - theirs else []
            shown += [f"only rank {rank}: {_some(theirs - mine)}"] if theirs - mine else []
            raise ValueError(
                f"rank {rank} has other {name}s than rank 0 ({'; '.join(shown)}); "
                "merge ranks of one run, started with one command"
            )
    shapes = [f.drop_duplicates("layer").set_index("layer")[list(_ALIKE)].sort_index() for f in (first, other)]
    if not shapes[0].equals(shapes[1]):
        at = (shapes[0] != shapes[1]).any(axis=1)
        layer = str(at.index[at.to_numpy(dtype=bool)][0])
        here, there = (", ".join(f"{name} {s.loc[layer, name]}" for name in _ALIKE) for s in shapes)
        raise ValueError(
            f"layer {layer!r} differs between ranks: rank 0 has {here}, rank {rank} {there}; "
            "tensor-parallel layers cannot be added"
        )


def _some(names: Collection[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:4]) + (f", ... ({len(ordered)})" if len(ordered) > 4 else "")
