"""Ranks add up: sums, maxima, copies counted once, and what cannot be added is refused."""

import numpy as np
import pandas as pd
import pytest

from analysis.results import merge, schema

LAYERS = ("blocks.0.self_attn.q", "blocks.0.cross_attn.k")


def rank(seed, calls=2, layers=LAYERS, variants=("shipped", "fixed"), **replaced):
    """A rank's per_call table with random sums."""
    rng = np.random.default_rng(seed)
    rows = []
    for call in range(calls):
        for layer in layers:
            for variant in variants:
                labels = {"schema_version": 1, "run_id": "r", "layer": layer, "variant": variant, "reference": "bf16"}
                labels |= {"tokens": "all", "call": call, "scene": "", "clip": None, "step": None, "block": 0}
                labels |= {"attention": "self", "projection": "q", "in_features": 8, "out_features": 8}
                sums = {c.name: rng.integers(1, 99) if c.dtype == "Int64" else rng.random() for c in schema.SUMS}
                rows.append(labels | sums | replaced)
    return schema.conform(pd.DataFrame(rows), schema.PER_CALL_COLUMNS, "made up")


def test_sums_add_and_the_largest_error_is_the_largest():
    a, b = rank(1), rank(2)
    merged = merge.add_runs([a, b])
    assert len(merged) == len(a)
    for name in schema.SUM_NAMES:
        expected = np.maximum(a[name], b[name]) if name == "max_abs_e" else a[name] + b[name]
        assert (merged[name].to_numpy() == expected.to_numpy()).all(), name


def test_rows_in_another_order_give_the_same_table():
    a, b = rank(1), rank(2)
    shuffled = b.sample(frac=1, random_state=0)
    pd.testing.assert_frame_equal(merge.add_runs([a, b]), merge.add_runs([a, shuffled]))


def test_replicated_layers_count_once():
    a, b = rank(1), rank(2)
    merged = merge.add_runs([a, b], replicated={LAYERS[1]})
    copies = merged["layer"] == LAYERS[1]
    assert merged[copies]["rows"].tolist() == a[a["layer"] == LAYERS[1]]["rows"].tolist()
    assert (merged[~copies]["rows"].to_numpy() > a[a["layer"] == LAYERS[0]]["rows"].to_numpy()).all()


def test_a_call_that_one_rank_lacks_is_kept():
    merged = merge.add_runs([rank(1, calls=1), rank(2, calls=3)])
    assert sorted(merged["call"].unique()) == [0, 1, 2]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (rank(2, layers=LAYERS[:1]), r"rank 1 has other layers than rank 0 \(only rank 0: blocks\.0\.cross_attn\.k\)"),
        (rank(2, variants=("shipped",)), r"other variants than rank 0 \(only rank 0: fixed\)"),
        (rank(2, reference="fp64"), r"other references .*only rank 0: bf16; only rank 1: fp64"),
        (rank(2, tokens="valid"), "other tokens"),
        (rank(2, in_features=4), r"layer 'blocks\.0\.cross_attn\.k' differs between ranks: .*rank 1 .*in_features 4"),
    ],
)
def test_what_cannot_be_added_is_named(other, message):
    with pytest.raises(ValueError, match=message):
        merge.add_runs([rank(1), other])
    with pytest.raises(ValueError, match="no table to merge"):
        merge.add_runs([])
