"""Names to quantisers: engines, foreign functions and their errors, source hashes."""

import hashlib
import subprocess
import sys

import pytest
import torch

from analysis import numerics
from analysis.kernels import common, registry
from analysis.numerics import Rounding

SOURCE = """
import torch
def flat(x):
    s = x.float().abs().amax(1) / 127
    return (x.float() / s[:, None]).round().to(torch.int8), s
def column(x):
    codes, s = flat(x)
    return codes, s[:, None].to(torch.float16)
def one(x): return flat(x)[0]
def wide(x): return flat(x)[0].int(), flat(x)[1]
def short(x): return flat(x)[0], flat(x)[1][1:]
number = 3
"""


@pytest.fixture
def kernels(tmp_path):
    path = tmp_path / "their_kernels.py"
    path.write_text(SOURCE)
    return path


@pytest.mark.parametrize("rounding", [Rounding.SHIPPED, Rounding.FIXED])
@pytest.mark.parametrize("engine", registry.ENGINES)
def test_every_engine_gives_the_reference_on_a_cpu(rounding, engine):
    if engine == "triton" and not common.INTERPRETED.value:
        pytest.skip("needs TRITON_INTERPRET=1")
    x = torch.randn(4, 40)
    codes, scales = registry.quantizer(rounding, "cpu", engine)(x)
    expected, expected_scales = numerics.quantize_rows(x, rounding)
    assert torch.equal(codes, expected) and torch.equal(scales, expected_scales)


@pytest.mark.gpu
def test_auto_is_triton_on_a_gpu():
    fixed = registry.quantizer("fixed", "cuda")
    assert fixed.func.__module__ == "analysis.kernels.quantize"
    assert registry.quantizer("half_even", "cuda").func.__module__ == "analysis.numerics"
    x = torch.randn(4, 40, device="cuda")
    assert torch.equal(fixed(x)[0], numerics.quantize_rows(x, Rounding.FIXED)[0])


def test_every_rounding_runs_and_stochastic_is_seeded():
    x = torch.randn(3, 50)
    for rounding in Rounding:
        first, second = (registry.quantizer(rounding, "cpu")(x)[0] for _ in range(2))
        assert torch.equal(first, second)


def test_foreign_functions(kernels):
    x = torch.randn(5, 30)
    expected, expected_scales = numerics.quantize_rows(x, Rounding.HALF_EVEN)
    for name in ("flat", "column"):
        codes, scales = registry.quantizer(f"{kernels}:{name}", "cpu")(x)
        assert (codes.int() - expected.int()).abs().max() <= 1
        assert scales.shape == (5,) and scales.dtype == torch.float32
        torch.testing.assert_close(scales, expected_scales, rtol=1e-3, atol=0)
    assert registry.load_foreign(f"{kernels}:flat") is registry.load_foreign(f"{kernels}:flat")
    assert registry.quantizer("analysis.numerics:quantize_weight", "cpu")(x)[0].shape == (5, 30)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("one", r"must return \(codes, scales\), got int8 \[2, 3\]"),
        ("wide", r"must return codes as int8 \[2, 3\], got int32 \[2, 3\]"),
        ("short", r"must return floating scales as \[2\] or \[2, 1\], got float32 \[1\]"),
    ],
)
def test_wrong_results_are_named(kernels, name, message):
    quantize = registry.quantizer(f"{kernels}:{name}", "cpu")
    with pytest.raises(ValueError, match=message):
        quantize(torch.ones(2, 3))


def test_what_cannot_be_loaded_is_named(kernels, tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("import no_such_module_anywhere")
    for spec, message in [
        (f"{kernels}:nothing", "has no 'nothing'; its functions: flat, column, one, wide, short"),
        (f"{kernels}:number", "is not callable but int"),
        (f"{tmp_path}/absent.py:f", "no file"),
        (f"{broken}:f", "cannot import .*ModuleNotFoundError"),
        ("no_such_module_anywhere:f", "cannot import 'no_such_module_anywhere'"),
        (f"{kernels}:", "cannot read"),
    ]:
        with pytest.raises(ValueError, match=message):
            registry.quantizer(spec, "cpu")
    with pytest.raises(ValueError, match="no file"):
        registry.source_sha256(f"{tmp_path}/absent.py:f")


def test_unknown_names_and_engines_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="unknown rounding 'nearest'; known: shipped, fixed"):
        registry.quantizer("nearest", "cpu")
    with pytest.raises(ValueError, match="unknown engine 'fast'; known: auto, triton, reference"):
        registry.quantizer("fixed", "cpu", "fast")
    with pytest.raises(ValueError, match="'half_even' has no Triton kernel; use engine 'auto'"):
        registry.quantizer("half_even", "cpu", "triton")
    monkeypatch.setattr(common, "INTERPRETED", type(common.INTERPRETED)(False))
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1 in the environment before Python starts"):
        registry.quantizer("fixed", "cpu", "triton")
    monkeypatch.setattr(registry, "TRITON", False)
    with pytest.raises(ValueError, match="Triton is not installed"):
        registry.quantizer("fixed", "cpu", "triton")
    assert registry.quantizer("fixed", "cuda").func.__module__ == "analysis.numerics", "auto falls back"


def test_source_hashes(kernels):
    assert registry.source_sha256(f"{kernels}:flat") == hashlib.sha256(SOURCE.encode()).hexdigest()
    assert registry.source_sha256("shipped") == registry.source_sha256("fixed") != registry.source_sha256("half_even")
    reference = registry.source_sha256("half_even")
    assert registry.source_sha256("analysis.numerics:quantize_weight") == reference


def test_importing_the_registry_needs_no_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import analysis.kernels.registry as r, torch\n"
        "r.quantizer('fixed', 'cpu')(torch.ones(1, 2)); r.source_sha256('fixed')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
