"""What the adapter knows of Matrix-Game-3: padding, labels, the kernel swap, checks before a run, and the commands."""

import json
import shlex
import sys
import types

import pytest
import torch
from typer.testing import CliRunner

from analysis import numerics
from analysis.cli import build
from analysis.sites import PRESETS, parse_site
from analysis.worlds import matrix_game
from analysis.worlds.matrix_game import KernelSwap, Labels, Padding

SELF_Q = parse_site("blocks.3.self_attn.q", PRESETS["wan"])
CROSS_K = parse_site("blocks.3.cross_attn.k", PRESETS["wan"])
BOTH = (SELF_Q, parse_site("blocks.3.self_attn.v", PRESETS["wan"]))


def forward(x, seq_lens=None, grid_sizes=None):
    return x


def told(*args, **kwargs):
    padding = Padding()
    padding.note(forward, args, kwargs)
    return padding


def test_groups_are_built_once_per_shape_and_follow_the_lengths():
    padding = told(seq_lens=torch.tensor([3, 1]))
    x = torch.zeros(2, 4, 8)
    groups = [padding.groups(site, x) for site in BOTH]
    assert groups[0] is groups[1] and groups[0].tolist() == [1, 1, 1, 2, 1, 2, 2, 2]
    padding.note(forward, (x,), {"seq_lens": torch.tensor([4, 4])})
    assert padding.groups(SELF_Q, x).tolist() == [1] * 8
    assert padding.groups(CROSS_K, x) is None


def test_lengths_from_the_grid():
    padding = told(torch.zeros(1), grid_sizes=torch.tensor([[2, 1, 3]]))
    assert padding.groups(SELF_Q, torch.zeros(1, 8, 4)).tolist() == [1] * 6 + [2] * 2


def test_no_lengths_and_an_input_of_another_shape():
    with pytest.raises(ValueError, match=r"looked for 'seq_lens' and 'grid_sizes' among the arguments of blocks\.3"):
        told(torch.zeros(1)).groups(SELF_Q, torch.zeros(1, 4, 8))
    assert Padding(required=False).groups(SELF_Q, torch.zeros(1, 4, 8)) is None
    with pytest.raises(ValueError, match=r"input \[4, 8\] is not \[batch, tokens, channels\] with 1 lengths"):
        told(seq_lens=torch.tensor([3])).groups(SELF_Q, torch.zeros(4, 8))


def test_labels_count_clips_and_steps_by_what_is_predicted():
    def model(x, predict_latent_idx=None):
        return x

    labels = Labels()
    asked = [(0, 15), (0, 15), (11, 25), (11, 25), (11, 25)]
    found = [labels(model, (1,), {"predict_latent_idx": a}) for a in asked]
    assert [(f["clip"], f["step"]) for f in found] == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]
    assert labels(model, (1,), {}) == {}


@pytest.fixture
def upstream(monkeypatch):
    """A module that loads its kernels as upstream does: once, when the first int8 layer runs."""
    module = types.ModuleType(matrix_game.MODEL_MODULE)
    kernels = types.SimpleNamespace(int8_quantize_triton=lambda x: (_ for _ in ()).throw(AssertionError("theirs ran")))
    module._get_triton_kernels = lambda: kernels
    monkeypatch.setitem(sys.modules, matrix_game.MODEL_MODULE, module)
    return module


@pytest.mark.parametrize("kernel", ["shipped", "fixed"])
def test_the_kernel_swap_answers_as_upstreams_quantiser(upstream, kernel):
    swap = KernelSwap(kernel)
    swap.install()
    x = torch.randn(2, 3, 16)
    codes, scales = upstream._get_triton_kernels().int8_quantize_triton(x)
    expected = numerics.quantize_rows(x.view(6, 16), numerics.Rounding(kernel))
    assert torch.equal(codes.view(6, 16), expected[0]) and torch.equal(scales.view(6), expected[1])
    assert codes.shape == x.shape and scales.shape == (2, 3) and swap.calls == 1


def test_a_swap_that_cannot_be_made(monkeypatch):
    with pytest.raises(ValueError, match="unknown kernel 'half_even'; known: shipped, fixed"):
        KernelSwap("half_even")
    monkeypatch.setitem(sys.modules, matrix_game.MODEL_MODULE, types.ModuleType("m"))
    with pytest.raises(ValueError, match="has no _get_triton_kernels"):
        KernelSwap("fixed").install()


@pytest.fixture
def installed(tmp_path):
    """A repo, a checkpoint and an image, as far as a check can see."""
    repo, weights = tmp_path / "Matrix-Game-3", tmp_path / "weights"
    for name in ("generate.py", "wan/modules/model.py", "wan/triton_kernels.py", "pipeline/inference_pipeline.py"):
        (repo / name).parent.mkdir(parents=True, exist_ok=True)
        (repo / name).write_text("import sys; print('ran', sys.argv[1:])")
    (weights / "base_distilled_model").mkdir(parents=True)
    (weights / "google" / "umt5-xxl").mkdir(parents=True)
    (weights / "models_t5_umt5-xxl-enc-bf16.pth").touch()
    (weights / "base_distilled_model" / "model.safetensors").touch()
    config = {"dim": 3072, "num_heads": 24, "num_layers": 30}
    (weights / "base_distilled_model" / "config.json").write_text(json.dumps(config))
    (tmp_path / "first.png").touch()
    return tmp_path


def run(installed, *more, **replaced):
    words = {"repo": "Matrix-Game-3", "ckpt-dir": "weights", "image": "first.png", "out": "out"} | replaced
    line = ["matrix-game", *(w for k, v in words.items() for w in (f"--{k}", str(installed / v))), *more]
    return CliRunner().invoke(build(), line)


def test_the_commands_are_printed_and_measure_then_roll_out(installed):
    result = run(installed, "--dry-run", "--prompt", "a street", "--seed", "7", "--", "--fa_version", "0")
    assert result.exit_code == 0, result.exception
    lines = [shlex.split(line[1:-1].partition("&& ")[2]) for line in result.stdout.splitlines() if line.startswith("(")]
    assert [line[line.index("--save_name") + 1] for line in lines] == ["bf16", "int8-shipped", "int8-fixed"]
    assert all(line[line.index("--seed") + 1] == "7" and line[-1 if "--use_int8" not in line else -2] for line in lines)
    assert "--kernel" not in lines[0] and lines[0][lines[0].index("--tokens") + 1] == "both"
    for line, kernel in zip(lines[1:], ("shipped", "fixed"), strict=True):
        own, script = line[: line.index("--")], line[line.index("--") + 1 :]
        assert own[own.index("--kernel") + 1] == kernel and script[0] == "generate.py" and script[-1] == "--use_int8"
        assert script[script.index("--prompt") + 1] == "a street" and "--fa_version" in script


def test_several_processes_go_through_torchrun(installed):
    result = run(installed, "--dry-run", "--processes", "2", "--no-measure")
    lines = [line for line in result.stdout.splitlines() if line.startswith("(")]
    assert all("torch.distributed.run --nproc_per_node=2" in line and "--ulysses_size 2" in line for line in lines)
    assert "attach" not in lines[0] and "-m analysis.cli attach" in lines[1]


def test_a_command_that_fails_is_named(installed):
    (installed / "Matrix-Game-3" / "generate.py").write_text("import sys; sys.exit(9)")
    result = run(installed, "--no-measure")
    assert isinstance(result.exception, ValueError) and "bf16 exited 9" in str(result.exception)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "Matrix-Game-3" / "generate.py").unlink(), "is not a Matrix-Game-3 folder: no generate.py"),
        (lambda f: (f / "weights/base_distilled_model/config.json").unlink(), "no base_distilled_model/config.json"),
        (lambda f: (f / "weights/base_distilled_model/config.json").write_text("{"), "is not JSON"),
        (lambda f: (f / "weights/base_distilled_model/config.json").write_text("{}"), "no dim, num_heads, num_layers"),
        (lambda f: (f / "weights/base_distilled_model/model.safetensors").unlink(), "no weights"),
        (lambda f: (f / "weights/models_t5_umt5-xxl-enc-bf16.pth").unlink(), "no models_t5_umt5-xxl-enc-bf16.pth"),
        (lambda f: (f / "first.png").unlink(), "first.png does not exist"),
    ],
)
def test_what_is_missing_is_said_before_anything_runs(installed, damage, message):
    damage(installed)
    result = run(installed)
    assert isinstance(result.exception, (ValueError, FileNotFoundError)) and message in str(result.exception)
    assert not (installed / "out").exists()


def test_the_folder_above_is_recognised(installed):
    result = run(installed, repo=".")
    assert "did you mean" in str(result.exception)
