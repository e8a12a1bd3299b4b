"""The watcher: whatever a script does to its models, layers are found, named once, and nothing changes."""

import contextlib
import copy
import gc
import io
import pickle
import threading
import types

import pytest
import torch
from torch import nn

from analysis.capture.hooks import attached
from analysis.capture.online import OnlineSink
from analysis.capture.watch import Watcher
from analysis.measure.replay import Replay
from analysis.sites import PRESETS, SitePattern, find_sites
from analysis.worlds.matrix_game import Padding
from tests.helpers import ToyModel

WAN = PRESETS["matrix-game-3"]
QK = SitePattern("--sites", r"(?P<projection>[qkvo])")


def inputs(seed=0, rows=11, batch=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, rows, 48, generator=generator), torch.randn(batch, 5, 48, generator=generator)


class Watching:
    """A watcher that is installed inside the `with`; collects what it reports."""

    def __init__(self, pattern=WAN, tokens="all", variants=("shipped", "fixed")):
        self.sink = OnlineSink(Replay(variants), tokens)
        self.reports = []
        padding = Padding() if tokens != "all" else None
        self.watcher = Watcher(pattern, self.sink, self.reports.append, padding)

    def __enter__(self):
        self.watcher.install()
        return self

    def __exit__(self, *_):
        self.watcher.remove()

    def table(self):
        return self.sink.table("r")


@torch.no_grad()
def test_the_sums_are_those_of_attached_and_nothing_is_left_behind():
    model = ToyModel()
    with Watching() as watching:
        for call in range(3):
            model(*inputs(call))
    sink = OnlineSink(Replay(["shipped", "fixed"]))
    with attached(model, find_sites(model, WAN), sink):
        for call in range(3):
            model(*inputs(call))
    assert watching.table().equals(sink.table("r")) and len(watching.table()) == 16 * 2 * 3
    assert not torch.nn.modules.module._has_any_global_hook()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_outputs_and_random_state_are_unchanged(mode):
    model = ToyModel()
    with mode():
        plain = model(*inputs())
        state = torch.get_rng_state()
        with Watching(), torch.autocast("cpu", torch.bfloat16, enabled=False):
            seen = model(*inputs())
        assert torch.equal(seen, plain) and torch.equal(torch.get_rng_state(), state)
        with torch.autocast("cpu", torch.bfloat16):
            plain = model(*inputs())
            with Watching() as watching:
                assert torch.equal(model(*inputs()), plain)
    assert len(watching.table()) == 32


def test_the_reference_ignores_autocast():
    model = ToyModel()
    with torch.no_grad():
        with Watching() as plain:
            model(*inputs())
        with Watching() as cast, torch.autocast("cpu", torch.bfloat16):
            model(*inputs())
    row = "layer == 'blocks.0.self_attn.q' and variant == 'fixed'"  # its input is the same in both
    assert plain.table().query(row)["sum_yy"].iloc[0] == pytest.approx(cast.table().query(row)["sum_yy"].iloc[0], 1e-2)


def test_gradients_are_unchanged():
    def gradient(model):
        model(*inputs()).square().sum().backward()
        return model.blocks[0].self_attn.q.weight.grad

    plain = gradient(ToyModel())
    with Watching():
        assert torch.equal(gradient(ToyModel()), plain)


@torch.no_grad()
def test_models_built_late_and_twice_and_deleted():
    with Watching() as watching:
        nn.Linear(4, 4)(torch.ones(1, 4))
        model = ToyModel()
        model(*inputs())
        del model
        model = ToyModel(seed=1)  # the same layers again: the name is free
        model(*inputs())
        other = ToyModel(seed=2, blocks=1)
        other(*inputs())  # a second model beside it
    names = set(watching.table()["layer"])
    assert len(names) == 24 and "blocks.0.self_attn.q#2" in names and watching.sink.calls == 3
    known = watching.watcher._known
    del model, other
    gc.collect()
    assert not known


@torch.no_grad()
def test_wrappers_share_names_and_a_wrapped_call_counts_once():
    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, *args):
            return self.module(*args)

    model = ToyModel()
    with Watching() as watching:
        model(*inputs())
        Wrapper(model)(*inputs(1))
    table = watching.table()
    assert len(set(table["layer"])) == 16 and table["call"].unique().tolist() == [0, 1]
    assert watching.sink.calls == 2


@torch.no_grad()
def test_keyword_inputs_replaced_forwards_and_swapped_layers():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.q(input=x) + self.k(x)

    model = Attention()
    with Watching(QK) as watching:
        model(torch.ones(2, 8))
        model.forward = types.MethodType(lambda self, x: self.q(x) - self.k(x), model)
        model(torch.ones(3, 8))
        model.k = nn.Linear(8, 8)  # altered after its first run
        model(torch.ones(4, 8))
        model.q.forward = types.MethodType(lambda self, x: nn.functional.linear(x, self.weight), model.q)
        model(torch.ones(5, 8))
    table = watching.table().query("variant == 'fixed'")
    assert table.groupby("layer")["rows"].apply(list).to_dict() == {"q": [2, 3, 4, 5], "k": [2, 3, 4, 5]}


@torch.no_grad()
def test_modules_shared_between_sites_and_modules_made_in_every_forward():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.q = self.k = nn.Linear(8, 8)

        def forward(self, x):
            return nn.Softmax(-1)(self.q(x)) + self.k(x)

    with Watching(QK) as watching:
        model = Tied()
        for _ in range(3):
            model(torch.ones(2, 8))
    assert watching.table()["layer"].unique().tolist() == ["q"] and (watching.table()["rows"] == 4).all()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_in_place_write_between_q_and_k_is_seen(mode):
    class Writer(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            x = x * 1
            y = self.q(x)
            x.zero_()
            y = y + self.k(x)
            x.fill_(1)
            return y + self.v(x)

    with mode(), Watching(QK) as watching:
        Writer()(torch.ones(2, 8))
    assert watching.table().query("variant == 'fixed'").set_index("layer")["zero_rows"].to_dict() == {
        "q": 0,
        "k": 2,
        "v": 0,
    }


@torch.no_grad()
def test_copies_and_pickles_of_a_watched_model_are_clean():
    model = ToyModel()
    with Watching() as watching:
        model(*inputs())
        twin = copy.deepcopy(model)
        twin(*inputs(1))
        buffer = io.BytesIO()
        pickle.dump(model, buffer)
    assert len(set(watching.table()["layer"])) == 32  # the living original and its copy
    assert (watching.table().groupby("layer")["rows"].max() <= 11).all()
    for left in (model, twin, pickle.loads(buffer.getvalue())):
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in left.modules())


@torch.no_grad()
def test_a_forward_pass_that_raises_is_discarded_and_the_next_counts():
    model = ToyModel()
    with Watching() as watching:
        for context in (5, 7, 5):
            with contextlib.suppress(RuntimeError):
                model(inputs()[0], torch.randn(1, 5, 48 if context == 5 else 7))
    assert watching.sink.calls == 2 and sorted(watching.table()["call"].unique()) == [0, 1]


@torch.no_grad()
def test_threads_do_not_mix_calls():
    model, other, together = ToyModel(), ToyModel(seed=1), threading.Barrier(2)
    model.blocks[0].norm1.register_forward_pre_hook(lambda *_: (together.wait(), together.wait())[0] and None)

    def second():
        together.wait()
        with torch.no_grad():
            other(*inputs(rows=3))
        together.wait()

    with Watching() as watching:
        thread = threading.Thread(target=second)
        thread.start()
        model(*inputs())
        thread.join()
    assert watching.sink.calls == 1 and watching.watcher.notes == {"calls in a second thread while one ran": 1}
    assert set(watching.table()["rows"]) == {11, 5}


@torch.no_grad()
def test_compiled_layers_are_silent_and_unchanged():
    model = ToyModel()
    plain = torch.compile(copy.deepcopy(model), backend="eager")(*inputs())
    torch._dynamo.reset()
    with Watching() as watching:
        assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(*inputs()), plain)
    assert len(watching.watcher.found) == 16 and watching.table().empty and not watching.watcher.stopped


@torch.no_grad()
def test_a_match_that_is_not_linear_stops_the_measurement_only():
    model = ToyModel()
    plain = model(*inputs())
    with Watching(SitePattern("--sites", r"blocks\.0\.norm1")) as watching:
        assert torch.equal(model(*inputs()), plain)
        assert not torch.nn.modules.module._has_any_global_hook()
    assert "matches 'blocks.0.norm1', of type LayerNorm, not a linear layer" in watching.watcher.stopped
    assert watching.reports and "the script goes on" in watching.reports[0]


@torch.no_grad()
def test_out_of_memory_in_a_hook_stops_the_measurement_and_keeps_finished_calls(monkeypatch):
    model = ToyModel()
    plain = model(*inputs())
    with Watching() as watching:
        model(*inputs())
        measure = watching.sink.replay.measure

        def full(layer, *args):
            if layer.site.name == "blocks.1.self_attn.k":
                raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB\nmore text")
            return measure(layer, *args)

        monkeypatch.setattr(watching.sink.replay, "measure", full)
        assert torch.equal(model(*inputs()), plain)
        assert torch.equal(model(*inputs()), plain)
    assert watching.table()["call"].unique().tolist() == [0]
    assert watching.watcher.stopped.startswith("blocks.1.self_attn.k: OutOfMemoryError: CUDA out of memory.")
    assert watching.sink.replay._last is None and len(watching.reports) == 1


class Padded(nn.Module):
    """A model that appends padding and tells its blocks the lengths, as Wan does."""

    def __init__(self, tell="keyword"):
        super().__init__()
        self.blocks, self.tell = nn.ModuleList([PaddedBlock()]), tell

    def forward(self, x, lengths):
        told = torch.tensor(lengths)
        grid = torch.tensor([[1, 1, n] for n in lengths])
        match self.tell:
            case "keyword":
                return self.blocks[0](x, seq_lens=told, grid_sizes=grid)
            case "position":
                return self.blocks[0](x, told)
            case "grid":
                return self.blocks[0](x, grid_sizes=grid)
            case _:
                return self.blocks[0](x)


class PaddedBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn, self.cross_attn = ToyModel().blocks[0].self_attn, ToyModel().blocks[0].cross_attn

    def forward(self, x, seq_lens=None, grid_sizes=None):
        return self.cross_attn(self.self_attn(x, x), x[:, :4])


@pytest.mark.parametrize("tell", ["keyword", "position", "grid"])
@torch.no_grad()
def test_padding_is_told_by_the_blocks_arguments(tell):
    x = inputs(rows=6, batch=2)[0]
    with Watching(tokens="both") as watching:
        Padded(tell)(x, (6, 4))
    rows = watching.table().query("variant == 'fixed'").set_index(["layer", "tokens"])["rows"]
    assert rows["blocks.0.self_attn.q", "all"] == 12 and rows["blocks.0.self_attn.q", "valid"] == 10
    assert rows["blocks.0.cross_attn.o", "valid"] == 10 and rows["blocks.0.cross_attn.k", "valid"] == 8
    only = OnlineSink(Replay(["fixed"]), "all")
    model = Padded(tell)
    with attached(model, find_sites(model, WAN), only):
        model(x[:1], (6,))
    with Watching(tokens="valid", variants=("fixed",)) as first:
        model(x[:1], (6,))
    assert first.table()["sum_ee"].tolist() == only.table("r")["sum_ee"].tolist()


@torch.no_grad()
def test_no_lengths_names_what_was_looked_for():
    with Watching(tokens="valid") as watching:
        Padded("nothing")(inputs()[0], (6,))
    assert "looked for 'seq_lens' and 'grid_sizes' among the arguments of blocks.0" in watching.watcher.stopped


@torch.no_grad()
def test_a_hooked_block_copies_and_pickles_clean():
    model = Padded()
    with Watching(tokens="both") as watching:
        model(inputs()[0], (9,))
        assert model.blocks[0]._forward_pre_hooks
        buffer = pickle.dumps(model)
        twin = copy.deepcopy(model)
        for left in (twin, pickle.loads(buffer)):
            left(inputs()[0], (7,))  # what a hook left in a copy does nothing
    assert b"analysis" not in buffer and not model.blocks[0]._forward_pre_hooks
    valid = watching.table().query("variant == 'fixed' and tokens == 'valid' and projection == 'q'")
    assert valid.groupby("layer")["rows"].sum()["blocks.0.self_attn.q"] == 9
    assert valid["rows"].tolist() == [9, 9, 7, 7, 7, 7] and not watching.watcher.stopped


@torch.no_grad()
def test_a_rank_with_a_part_of_the_sequence_knows_where_it_starts(monkeypatch):
    ranks = []
    for rank in range(2):
        monkeypatch.setattr("analysis.worlds.matrix_game._ranks", lambda: 2)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        with Watching(tokens="both") as watching:
            Padded()(inputs(rows=6)[0], (8,))  # 12 tokens in two parts, 8 of them valid
        rows = watching.table().query("variant == 'fixed'").set_index(["layer", "tokens"])["rows"]
        ranks.append([int(rows["blocks.0.self_attn.q", t]) for t in ("all", "valid")])
        assert watching.watcher.padding.replicated == {"blocks.0.cross_attn.k", "blocks.0.cross_attn.v"}
    assert ranks == [[6, 6], [6, 2]]


@torch.no_grad()
def test_a_paused_watcher_goes_on_and_a_removed_one_can_start_again():
    model = Padded()
    watching = Watching(tokens="both")
    for end in (watching.watcher.pause, watching.watcher.pause, watching.watcher.remove, watching.watcher.remove):
        watching.watcher.install()
        model(inputs()[0], (9,))
        end()
        assert not torch.nn.modules.module._has_any_global_hook()
        model(inputs()[0], (9,))
    assert watching.sink.calls == 4 and not watching.watcher.stopped
    assert len(watching.table()) == 8 * 2 * 2 * 4 and not model.blocks[0]._forward_pre_hooks
