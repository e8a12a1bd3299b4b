"""Planted Triton kernels in the interpreter: the same verdicts as in PyTorch, and what only Triton kernels can do."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")

from analysis.audit import audit, interpreter  # noqa: E402

if not triton.knobs.runtime.interpret:
    pytest.skip("kernels are compiled for a GPU in this process", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, where a kernel divides by zero
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPE = (8, 128)


@pytest.fixture(autouse=True)
def _repaired_interpreter():
    with interpreter.repaired():
        yield


@pytest.fixture(scope="module")
def planted():
    with interpreter.repaired():  # names taken from libdevice at import are the repaired ones
        import planted_triton

    return planted_triton


ROUNDINGS = ("half_even", "half_away", "truncate", "floor", "floor_half", "double_rounded", "stochastic", "other")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_each_rounding_is_named(planted, rounding, dtype):
    shape = (4, 64) if rounding == "stochastic" else SHAPE  # its random numbers are slow in the interpreter
    report = audit(planted.ROUNDINGS[rounding], dtypes=[dtype], edges=False, shape=shape)
    assert report.rounding == rounding, str(report)


@pytest.mark.parametrize(
    ("check", "dtype"),
    [
        ("undefined_lanes", torch.float32),
        ("zero_row", torch.bfloat16),
        ("wrap", torch.float16),
        ("positions", torch.bfloat16),
        ("unwritten", torch.float32),
        ("noncontiguous", torch.float16),
    ],
    ids=str,
)
def test_each_edge_defect_is_named(planted, check, dtype):
    report = audit(planted.EDGES[check], dtypes=[dtype], shape=SHAPE)
    assert {finding.check for finding in report.defects} == {check}, str(report)
    assert report.rounding == "half_even"


def test_correct_kernels_are_clean(planted):
    for kernel in (planted.half_even, planted.half_away, planted.autotuned):
        report = audit(kernel, dtypes=[torch.float16], shape=(4, 64))
        assert report.clean, str(report)


def test_the_projects_own_kernels():
    from analysis.audit import targets

    fixed = audit(targets.fixed, dtypes=[torch.bfloat16], shape=(4, 64))
    assert fixed.rounding == "half_away" and fixed.clean and fixed.findings == (), str(fixed)
    shipped = audit(targets.shipped, dtypes=[torch.bfloat16], shape=(4, 64))
    assert shipped.rounding == "truncate" and {f.check for f in shipped.defects} == {"rounding"}, str(shipped)


def test_libdevice_and_bf16_casts_have_their_meaning_on_a_gpu(planted):
    report = audit(planted.ROUNDINGS_IN_LIBDEVICE["half_away"], dtypes=[torch.float32], edges=False, shape=SHAPE)
    assert report.rounding == "half_away"
    values = torch.tensor([1.00390625, 1.01171875, -3.3895e38, float("inf"), 0.1, 1e-40])
    bits = interpreter._to_bf16_bits(values.numpy())
    expected = values.to(torch.bfloat16).view(torch.int16).numpy().view("uint16")
    assert (bits == expected).all()


def test_the_repairs_end_with_the_context():
    from triton.runtime import interpreter as ti

    inside = ti._convert_float
    with interpreter.repaired():
        assert ti._convert_float is not inside
    assert ti._convert_float is inside
