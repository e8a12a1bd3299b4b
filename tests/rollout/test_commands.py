"""The commands, end to end on a micro world and a store: files, refusals, what is said."""

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from analysis.capture.hooks import attached
from analysis.capture.store import MANIFEST, Store, StoreSink
from analysis.cli import build
from analysis.results import studies, tables
from analysis.rollout.layer_studies import Collector, read_store
from analysis.sites import find_sites, preset
from analysis.worlds import world as worlds
from tests.helpers import ToyModel
from tests.rollout.conftest import micro_world
from tests.rollout.test_video import clip, save


@pytest.fixture(autouse=True)
def _micro(monkeypatch):
    made = micro_world(3, 2)
    monkeypatch.setattr(worlds, "get_world", lambda name: made)


def shrinkage(*arguments):
    result = CliRunner().invoke(build(), [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_rollout(tmp_path):
    said = shrinkage("rollout", "--out", tmp_path, "--scenes", 3, "--clips", 2, "--seeds", 2, "--metrics", "psnr,ssim")
    assert str(tmp_path / "closed_loop.csv") in said.replace("\n", "") and "shipped" in said
    table = tables.read(studies.CLOSED_LOOP, tmp_path)
    assert set(table["variant"]) == {"fp32", "shipped", "fixed"} and (table["scenes"] == 3).all()
    assert (table["pairs"] == 6).all()
    info = tables.read_info("closed_loop", tmp_path)
    assert info["seeds"] == [0, 1] and info["clips"] == 2 and info["run_id"] == table["run_id"][0]
    assert (tmp_path / "closed_loop.webp").stat().st_size > 0 and (tmp_path / "closed_loop.mp4").stat().st_size > 0
    with pytest.raises(FileExistsError, match="already holds"):
        shrinkage("rollout", "--out", tmp_path, "--scenes", 3, "--clips", 2)


def test_rollout_is_reproducible(tmp_path):
    for name in ("a", "b"):
        shrinkage("rollout", "--out", tmp_path / name, "--scenes", 3, "--clips", 1, "--no-video", "--metrics", "psnr")
    assert (tmp_path / "a/closed_loop.csv").read_bytes() == (tmp_path / "b/closed_loop.csv").read_bytes()


def test_rollout_of_two_scenes_says_that_there_is_no_verdict(tmp_path, capsys):
    shrinkage("rollout", "--out", tmp_path, "--scenes", 2, "--clips", 1, "--no-video", "--metrics", "psnr")
    table = tables.read(studies.CLOSED_LOOP, tmp_path)
    assert table["difference_lo"].isna().all() and set(table["verdict"].dropna()) <= {"undecided", ""}


def test_rollout_of_videos(tmp_path):
    paths = [save(tmp_path / f"{n}.mp4", clip(6)) for n in "abc"]
    shrinkage("rollout", "--out", tmp_path / "o", "--frames", *paths, "--metrics", "psnr,flip", "--flip-every", 2)
    frames = tables.read(studies.CLOSED_LOOP_FRAMES, tmp_path / "o")
    assert set(frames["variant"]) == {"shipped", "fixed"} and (frames["psnr_db"] == 60).all()
    assert frames["flip"].notna().sum() == 6 and frames["ssim"].isna().all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--scenes", "9"), "3 scenes, asked for 9"),
        (("--clips", "7"), r"1\.\.2 clips, asked for 7"),
        (("--variants", "nearest"), "unknown rounding 'nearest'"),
        (("--metrics", "psnr,lpips"), "unknown metric 'lpips'"),
        (("--margin", "0"), "--margin must be positive"),
    ],
)
def test_rollout_refuses(tmp_path, arguments, message):
    default = {"--scenes": "3", "--clips": "1"} | dict([arguments])
    with pytest.raises(ValueError, match=message):
        shrinkage("rollout", "--out", tmp_path, "--no-video", *(a for pair in default.items() for a in pair))
    assert not list(tmp_path.iterdir())


def test_ablate_and_propagate(tmp_path):
    shrinkage("ablate", "--out", tmp_path, "--scenes", 2, "--clips", 2, "--rows", 16)
    ablation, theory = (tables.read(t, tmp_path) for t in (studies.ABLATION, studies.THEORY))
    assert (ablation["calls"] == 8).all() and ablation[ablation["factor"] == "none"]["change"].eq(0).all()
    assert len(theory) == 16 * 2 and theory["closure"].abs().max() < 1e-6
    shrinkage("propagate", "--out", tmp_path, "--scenes", 2)
    assert len(tables.read(studies.PROPAGATION, tmp_path)) and len(tables.read(studies.ATTENTION, tmp_path))
    with pytest.raises(ValueError, match="unknown factor 'colour'; known: none, accumulation"):
        shrinkage("ablate", "--out", tmp_path / "x", "--factors", "colour")


def store_of(folder):
    model = ToyModel()
    sink = StoreSink(folder, {"world": "toy", "expected": []})
    with torch.no_grad(), attached(model, find_sites(model, preset("matrix-game-3")), sink):
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            model(torch.randn(1, 20, 48, generator=generator), torch.randn(1, 5, 48, generator=generator))
    sink.close(complete=True)
    return folder


def test_ablate_a_store(tmp_path):
    store = store_of(tmp_path / "store")
    shrinkage("ablate", store, "--out", tmp_path / "o", "--factors", "weight_scale", "--no-theory")
    table = tables.read(studies.ABLATION, tmp_path / "o")
    assert set(table["factor"]) == {"none", "weight_scale"} and (table["calls"] == 3).all()
    assert table["change_lo"].notna().all() and not (tmp_path / "o" / "theory.csv").exists()


def test_a_store_without_weights_is_refused(tmp_path):
    store = store_of(tmp_path / "store")
    manifest = json.loads((store / MANIFEST).read_text())
    (store / "layers" / "0.safetensors").unlink()
    with pytest.raises(ValueError, match=r"holds no weight of blocks\.0\.self_attn\.q; this study needs"):
        shrinkage("ablate", store, "--out", tmp_path / "o")
    manifest["layers"] = {}
    (store / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="holds no weight of any layer"):
        list(read_store(Collector([]), Store(store)))


def test_online_and_stored_ablations_agree(tmp_path):
    from analysis.measure.ablation import Ablation

    model = ToyModel()
    collectors = [Collector([Ablation(["output"], rows=None)]) for _ in range(2)]
    store = store_of(tmp_path / "store")
    with torch.no_grad(), attached(model, find_sites(model, preset("matrix-game-3")), collectors[0]):
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            model(torch.randn(1, 20, 48, generator=generator), torch.randn(1, 5, 48, generator=generator))
    list(read_store(collectors[1], Store(store)))
    (a_sites, a), (b_sites, b) = (c.stacked(0) for c in collectors)
    order = [b_sites.index(site) for site in a_sites]
    assert a.shape == (3, 16, 4, 2) and np.allclose(a, b[:, order], rtol=1e-6)


def test_every_nth_call_is_measured_online_and_from_a_store(tmp_path):
    from analysis.measure.ablation import Ablation

    store = Store(store_of(tmp_path / "store"))
    every, all_of_them = (Collector([Ablation(["output"], rows=None)], n) for n in (2, 1))
    for collector in (every, all_of_them):
        list(read_store(collector, store))
    assert every.calls == 2 and all_of_them.calls == 3
    assert torch.allclose(every.stacked(0)[1], all_of_them.stacked(0)[1][::2], rtol=1e-12)
    with pytest.raises(ValueError, match="every must be at least 1, got 0"):
        Collector([], 0)
