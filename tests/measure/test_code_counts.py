"""Counts of codes against numpy's, on captured activations and on rows that must not count."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

from analysis import numerics
from analysis.capture.hooks import attached
from analysis.capture.online import OnlineSink
from analysis.capture.store import Store, StoreSink, replay_store
from analysis.measure import histogram
from analysis.measure.engine import pick_engine
from analysis.measure.replay import Replay
from analysis.results import codes, studies, tables
from analysis.sites import PRESETS, find_sites
from tests.helpers import ToyModel

WAN = PRESETS["matrix-game-3"]
KERNELS = ["shipped", "fixed"]
ROUND = {"shipped": np.trunc, "fixed": lambda s: np.trunc(s + np.copysign(np.float32(0.5), s))}


def numpy_counts(x: np.ndarray, rounding: str) -> np.ndarray:
    """Every 7th-call, every n-th row rule left out: the counts of all finite rows, from the contract's arithmetic."""
    x = x[np.isfinite(x).all(axis=1)].astype(np.float32)
    absmax = np.abs(x).max(axis=1, keepdims=True)
    inv = np.where(absmax > 0, np.float32(127) / np.where(absmax > 0, absmax, 1), np.float32(0))
    found, counts = np.unique(ROUND[rounding](x * inv).astype(np.int64), return_counts=True)
    out = np.zeros(256, dtype=np.int64)
    out[found + 128] = counts
    return out


def forward(sink, calls=9, rows=300):
    torch.manual_seed(0)
    model = ToyModel()
    with torch.no_grad(), attached(model, find_sites(model, WAN), sink):
        for call in range(calls):
            sink.label = {"scene": "toy", "clip": 0, "step": call}
            generator = torch.Generator().manual_seed(call)
            model(torch.randn(1, rows, 48, generator=generator), torch.randn(1, 5, 48, generator=generator))
    return sink


@pytest.fixture(scope="module")
def measured():
    return forward(OnlineSink(Replay(KERNELS))).code_table()


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    forward(StoreSink(folder, {"expected": []})).close(complete=True)
    return Store(folder)


def counts_of(table, layer, variant):
    mine = table[(table["layer"] == layer) & (table["variant"] == variant)]
    return mine.set_index("code")["count"].reindex(range(-128, 128), fill_value=0).to_numpy(np.int64)


def test_counts_are_numpys_on_captured_activations(measured, store):
    wanted: dict[tuple[str, str], np.ndarray] = {}
    for names in store.shared_inputs():
        for label, events in store.events(names):
            if label["call"] not in (0, 7):
                continue
            for event in events:
                x = event.x.reshape(-1, event.x.shape[-1]).numpy()
                x = x[:: 3 if len(x) == 300 else 1]  # at most 128 rows: every third of 300, all of 5
                for kernel in KERNELS:
                    key = (event.layer.site.name, kernel)
                    wanted[key] = wanted.get(key, 0) + numpy_counts(x, kernel)
    assert len(wanted) == 16 * 2 and set(measured["tokens"]) == {"all"}
    for (layer, kernel), counts in wanted.items():
        assert np.array_equal(counts_of(measured, layer, kernel), counts), (layer, kernel)
        other = KERNELS[1 - KERNELS.index(kernel)]
        assert not np.array_equal(counts_of(measured, layer, other), counts), "a swapped kernel is not seen"


def test_replay_of_the_store_counts_the_same_and_runs_repeat(measured, store):
    sink = OnlineSink(Replay(KERNELS))
    list(replay_store(store, sink))
    order = codes.KEY
    one, two = (t.sort_values(order).reset_index(drop=True) for t in (measured, sink.code_table()))
    pd.testing.assert_frame_equal(one, two)
    pd.testing.assert_frame_equal(measured, forward(OnlineSink(Replay(KERNELS))).code_table())


@pytest.mark.parametrize("engine", ["auto", "reference"])
def test_rows_that_do_not_count_and_groups(engine):
    x = torch.randn(40, 24, generator=torch.Generator().manual_seed(1))
    x[3, 5], x[4, 1], x[6] = torch.nan, torch.inf, 0
    groups = torch.ones(40, dtype=torch.uint8)
    groups[10:20], groups[20:25] = 2, 0
    counts = pick_engine(KERNELS, "cpu", engine).quantize(x, groups).code_counts.numpy()
    for place, kernel in enumerate(KERNELS):
        for group in (1, 2):
            expected = numpy_counts(x[groups == group].numpy(), kernel)
            assert np.array_equal(counts[place, group - 1], expected), (kernel, group)
    assert counts.sum() == 2 * (40 - 5 - 2) * 24


def test_any_code_counts_and_no_row_at_all():
    every = torch.arange(-128, 128, dtype=torch.int8).view(1, 256)
    assert histogram.count_codes([every], torch.ones(1, dtype=torch.uint8))[0, 0].tolist() == [1] * 256
    none = histogram.count_codes([every[:0]], torch.ones(0, dtype=torch.uint8))
    assert none.shape == (1, 2, 256) and int(none.sum()) == 0


@pytest.mark.parametrize("rows", [1, 127, 128, 129, 300, 880, 13_200])
def test_rows_taken_are_odd_steps_apart_and_at_most_so_many(rows):
    taken = range(0, rows, codes.stride(rows))
    assert len(taken) <= codes.MOST_ROWS and (rows <= codes.MOST_ROWS) == (len(taken) == rows)
    assert codes.stride(rows) % 2 == 1 and len(taken) >= min(rows, 43)


def test_a_dropped_call_leaves_no_counts(measured):
    sink = OnlineSink(Replay(KERNELS))
    begin = sink.begin_call
    begin()
    model = ToyModel()
    with torch.no_grad(), attached(model, find_sites(model, WAN), sink):
        sink.end_call = lambda: sink.drop()
        model(torch.randn(1, 8, 48), torch.randn(1, 5, 48))
        del sink.end_call
    assert sink.code_table().empty
    pd.testing.assert_frame_equal(forward(sink).code_table(), measured)


def test_ranks_add_and_a_replicated_layer_counts_once(measured):
    layers = list(dict.fromkeys(measured["layer"]))
    both = codes.add([measured, measured], replicated=layers[:1])
    assert np.array_equal(counts_of(both, layers[0], "fixed"), counts_of(measured, layers[0], "fixed"))
    assert np.array_equal(counts_of(both, layers[1], "fixed"), 2 * counts_of(measured, layers[1], "fixed"))


def test_the_table_is_written_read_and_says_its_sample(measured, tmp_path):
    codes.write(measured, tmp_path, "abc")
    found = tables.read(studies.CODES, tmp_path)
    assert (found["run_id"] == "abc").all() and found["count"].sum() == measured["count"].sum()
    assert f"every {codes.EVERY_CALL}th" in studies.CODES.row and f"at most {codes.MOST_ROWS} " in studies.CODES.row
    codes.write(measured.iloc[:0], tmp_path, "abc")
    assert tables.find(studies.CODES, tmp_path) is None


def test_rounding_agrees_with_the_contract():
    """The check's own arithmetic is the reference quantiser's."""
    x = torch.randn(64, 48, generator=torch.Generator().manual_seed(2))
    for kernel in KERNELS:
        found, _ = numerics.quantize_rows(x, numerics.Rounding(kernel))
        mine = np.bincount(found.numpy().astype(np.int64).ravel() + 128, minlength=256)
        assert np.array_equal(mine, numpy_counts(x.numpy(), kernel))
