"""Hooks, the two sinks, and that both give the same sums."""

import json

import pandas as pd
import pytest
import torch
from torch import nn

from analysis.capture.hooks import attached
from analysis.capture.online import OnlineSink
from analysis.capture.store import MANIFEST, Store, StoreSink, replay_store
from analysis.measure import stats
from analysis.measure.replay import Layer, Replay
from analysis.results import schema
from analysis.sites import PRESETS, SitePattern, clean_name, find_sites, parse_site
from tests.helpers import ToyModel

WAN = PRESETS["matrix-game-3"]


def inputs(seed=0, rows=11):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, rows, 48, generator=generator), torch.randn(1, 5, 48, generator=generator)


def measure(model, calls=3, variants=("shipped", "fixed"), reference="bf16", tokens="all"):
    sink = OnlineSink(Replay(list(variants), reference), tokens)
    with torch.no_grad(), attached(model, find_sites(model, WAN), sink):
        for call in range(calls):
            sink.label = {"scene": "toy", "clip": 0, "step": call}
            model(*inputs(call))
    return sink


def store(model, folder, calls=3, **options):
    sink = StoreSink(folder, {"expected": []}, **options)
    with torch.no_grad(), attached(model, find_sites(model, WAN), sink):
        for call in range(calls):
            sink.label = {"scene": "toy", "clip": 0, "step": call}
            model(*inputs(call))
    sink.close(complete=True)
    return Store(folder)


def replayed(found, reference="bf16"):
    sink = OnlineSink(Replay(["shipped", "fixed"], reference))
    list(replay_store(found, sink))
    return sink.table("r")


def test_sites_of_a_matrix_game_like_model():
    sites = list(find_sites(ToyModel(), WAN))
    assert len(sites) == 16
    assert (sites[0].block, sites[0].attention, sites[0].projection) == (0, "self", "q")
    assert sites[0].norm == "blocks.0.self_attn.norm_q" and sites[3].norm == ""


@pytest.mark.parametrize(
    ("preset", "path", "expected"),
    [
        ("matrix-game-3", "_orig_mod.module.blocks.7.cross_attn.o", (7, "cross", "o")),
        ("diffusers", "transformer_blocks.2.attn2.to_out.0", (2, "cross", "o")),
        ("hf-bert", "bert.encoder.layer.3.attention.self.query", (3, "self", "q")),
        ("hf-bert", "encoder.layer.3.attention.output.dense", (3, "self", "o")),
        ("hf-llama", "model.layers.11.self_attn.k_proj", (11, "self", "k")),
    ],
)
def test_presets(preset, path, expected):
    site = parse_site(path, PRESETS[preset])
    assert (site.block, site.attention, site.projection) == expected


def test_wrappers_are_stripped():
    assert clean_name("_orig_mod._fsdp_wrapped_module.blocks.0._fsdp_wrapped_module.q") == "blocks.0.q"
    assert clean_name("module") == "" and clean_name("blocks.0.module_list.q") == "blocks.0.module_list.q"


def test_no_match_and_a_match_that_is_not_linear():
    with pytest.raises(ValueError, match=r"no layer matches 'mine'.*blocks\.0\.self_attn\.q"):
        find_sites(ToyModel(), SitePattern("mine", "nothing"))
    with pytest.raises(ValueError, match="a LayerNorm, not a linear layer"):
        find_sites(ToyModel(), SitePattern("mine", r"blocks\.0\.norm1"))


def test_hooks_change_nothing_and_are_removed_after_an_exception():
    model = ToyModel()
    with torch.no_grad():
        plain = model(*inputs())
    state = torch.get_rng_state()
    sink = OnlineSink(Replay(["shipped", "fixed"]))
    with torch.no_grad(), attached(model, find_sites(model, WAN), sink):
        assert torch.equal(model(*inputs()), plain)
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(RuntimeError, match="stop"), attached(model, find_sites(model, WAN), sink):
        raise RuntimeError("stop")
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_online_table_has_every_layer_call_and_variant():
    table = measure(ToyModel()).table("r")
    assert len(table) == 16 * 3 * 2
    assert table["step"].unique().tolist() == [0, 1, 2] and (table["scene"] == "toy").all()
    cross_k = table[table["layer"] == "blocks.0.cross_attn.k"]
    assert (cross_k["rows"] == 5).all() and (table[table["projection"] == "q"]["rows"] == 11).all()


def test_the_layers_of_one_call_agree_with_a_direct_replay():
    model = ToyModel()
    table = measure(model, calls=1).table("r").set_index(["layer", "variant"])
    x, _ = inputs()
    layers = {site.name: site for site in find_sites(model, WAN)}
    module = model.get_submodule("blocks.0.self_attn.v")
    lay = Layer(layers["blocks.0.self_attn.v"], module.weight.detach(), module.bias.detach())
    with torch.no_grad():
        direct = Replay(["fixed"]).measure(lay, model.blocks[0].norm1(x))[0, 0]
    assert table.loc[("blocks.0.self_attn.v", "fixed"), "sum_ee"] == pytest.approx(
        float(direct[stats.ALL_SUMS.index("sum_ee")]), rel=1e-12
    )


@pytest.mark.parametrize("reference", ["bf16", "fp64", "as_run"])
def test_capture_then_replay_gives_the_online_sums(tmp_path, reference):
    model = ToyModel()
    online = measure(model, reference=reference).table("r")
    found = replayed(store(model, tmp_path, outputs=reference == "as_run"), reference)
    keys = ["call", "layer", "variant"]
    online, found = (t.sort_values(keys).reset_index(drop=True) for t in (online, found))
    pd.testing.assert_frame_equal(online, found, rtol=1e-6)


def test_a_wrong_kernel_would_not_pass_that_comparison(tmp_path):
    model = ToyModel()
    online = measure(model).table("r")
    found = replayed(store(model, tmp_path))
    swapped = found.replace({"variant": {"shipped": "fixed", "fixed": "shipped"}})
    keys = ["call", "layer", "variant"]
    with pytest.raises(AssertionError):
        pd.testing.assert_frame_equal(
            online.sort_values(keys).reset_index(drop=True), swapped.sort_values(keys).reset_index(drop=True), rtol=1e-6
        )


def test_the_store_keeps_dtypes_shares_inputs_and_samples_rows(tmp_path):
    model = ToyModel().to(torch.bfloat16)
    sink = StoreSink(tmp_path, {}, rows=4, seed=1)
    with torch.no_grad(), attached(model, find_sites(model, WAN), sink):
        model(*(x.bfloat16() for x in inputs()))
    sink.close(complete=True)
    found = Store(tmp_path)
    assert found.shared_inputs()[0] == [f"blocks.0.self_attn.{p}" for p in "qkv"]
    _, events = next(found.events(found.shared_inputs()[0]))
    assert events[0].x is events[1].x and events[0].x.dtype == torch.bfloat16
    assert len(events[0].x) == 4 and events[0].layer.weight.dtype == torch.bfloat16
    again = StoreSink(tmp_path / "again", {}, rows=4, seed=1)
    with torch.no_grad(), attached(model, find_sites(model, WAN), again):
        model(*(x.bfloat16() for x in inputs()))
    again.close(complete=True)
    assert again.manifest["calls"][0]["sha256"] == sink.manifest["calls"][0]["sha256"]


def test_an_in_place_write_after_the_hook_does_not_reach_the_store(tmp_path):
    class Writer(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            y = self.q(x)
            x.zero_()
            return y + self.k(x)

    model, x = Writer(), torch.ones(2, 4)
    sink = StoreSink(tmp_path, {})
    with torch.no_grad(), attached(model, find_sites(model, SitePattern("w", "(?P<projection>[qk])")), sink):
        model(x)
    sink.close(complete=True)
    found = Store(tmp_path)
    values = {n: next(found.events([n]))[1][0].x for n in ("q", "k")}
    assert values["q"].sum() == 8 and values["k"].sum() == 0


@pytest.mark.parametrize("file", ["calls/1.safetensors", "layers/0.safetensors"])
def test_damaged_and_missing_files_are_named(tmp_path, file):
    found = store(ToyModel(), tmp_path)
    path = tmp_path / file
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(ValueError, match=rf"{file}: SHA-256 .* truncated or altered"):
        replayed(Store(tmp_path))
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ValueError, match="truncated or altered"):
        replayed(Store(tmp_path))
    path.unlink()
    with pytest.raises(FileNotFoundError, match=f"{file} is missing"):
        replayed(Store(tmp_path))
    path.write_bytes(data)
    assert len(replayed(found)) == 96


def test_a_store_of_another_version_or_none(tmp_path):
    with pytest.raises(FileNotFoundError, match="shrinkage capture"):
        Store(tmp_path)
    store(ToyModel(), tmp_path)
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(json.dumps(manifest | {"store_version": 99}))
    with pytest.raises(ValueError, match="store version 99, expected 1"):
        Store(tmp_path)


def test_an_unfinished_call_is_discarded():
    model, sink = ToyModel(), OnlineSink(Replay(["fixed"]))
    with torch.no_grad(), attached(model, find_sites(model, WAN), sink):
        model(*inputs())
        with pytest.raises(RuntimeError):
            model(inputs()[0], torch.randn(1, 5, 7))
        model(*inputs())
    assert sink.calls == 2 and sorted(sink.table("r")["call"].unique().tolist()) == [0, 1]


def test_a_layer_that_never_ran_is_known():
    model = ToyModel()
    model.blocks[1].forward = lambda x, context: x
    sink = measure(model, calls=1)
    assert "blocks.1.self_attn.q" not in sink.measured and len(sink.measured) == 8


def test_a_layer_that_runs_twice_in_a_call_adds_up():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.q = nn.Linear(8, 8)

        def forward(self, x):
            return self.q(self.q(x))

    sink = OnlineSink(Replay(["fixed"]))
    model = Twice()
    with torch.no_grad(), attached(model, find_sites(model, SitePattern("t", "q")), sink):
        model(torch.randn(3, 8))
    table = sink.table("r")
    assert len(table) == 1 and table["rows"].iloc[0] == 6


def test_an_empty_measurement_keeps_its_columns():
    table = OnlineSink(Replay(["fixed"])).table("r")
    assert table.empty and list(table.columns) == [c.name for c in schema.PER_CALL_COLUMNS]
    with pytest.raises(ValueError, match="unknown tokens 'padded'"):
        OnlineSink(Replay(["fixed"]), "padded")
