"""Scales: every layout and meaning is found out, or can be told; what cannot be read is refused with a reason."""

from __future__ import annotations

import planted_torch as planted
import pytest
import torch

from analysis.audit import CannotAudit, audit, edge_shapes, edge_values
from analysis.audit.call import perform
from analysis.audit.grid import FP8, INT8
from analysis.audit.judge import judge
from analysis.audit.layout import Told, find_layout
from analysis.audit.runner import LocalRunner


def grouped(x, group=32):
    m, k = x.shape
    blocks = x.float().view(m, k // group, group)
    scale = blocks.abs().amax(dim=-1) / 127.0
    codes = torch.round(torch.nan_to_num(blocks / scale[..., None])).to(torch.int8).view(m, k)
    return codes, scale


def row_blocks(x, rows=8):
    m = x.shape[0]
    ids = torch.arange(m) // rows
    absmax = torch.zeros(int(ids.max()) + 1).scatter_reduce(0, ids, x.float().abs().amax(dim=1), "amax")
    s = torch.nan_to_num(x.float() * (127.0 / absmax[ids])[:, None])
    return torch.round(s).to(torch.int8), absmax


def per_tensor(x):
    absmax = x.float().abs().max()
    return torch.round(torch.nan_to_num(x.float() * (127.0 / absmax))).to(torch.int8), absmax / 127.0


def per_column(x):
    scale = x.float().abs().amax(dim=0) / 127.0
    return torch.round(torch.nan_to_num(x.float() / scale)).to(torch.int8), scale


CASES = {
    "per row, [16], float32, scale": planted.half_even,
    "per row, [16, 1], float32, inverse": planted.half_away_inverse,
    "per row, [16], float32, absmax": lambda x: (planted.half_even(x)[0], x.float().abs().amax(dim=1)),
    "per group of 32, [16, 16], float32, scale": grouped,
    "per group of 32, group-major, [16, 16], float32, scale": lambda x: (grouped(x)[0], grouped(x)[1].t().contiguous()),
    "per group of 64, group-major, [8, 16], float32, scale": lambda x: (grouped(x, 64)[0], grouped(x, 64)[1].t()),
    "per group of 128, [64], float32, scale": lambda x: (grouped(x, 128)[0], grouped(x, 128)[1].flatten()),
    "per tensor, [], float32, scale": per_tensor,
    "per block of 8 rows x all columns, [2], float32, absmax": row_blocks,
    "per column, [512], float32, scale": per_column,
    "static 0.125": lambda x: (torch.round(x.float() * 8).clamp(-128, 127).to(torch.int8), torch.tensor(8.0)),
}


@pytest.mark.parametrize("layout", CASES)
def test_layout_and_meaning_are_found_out(layout):
    report = audit(CASES[layout], dtypes=[torch.float16])
    assert report.layout == layout
    assert report.rounding in ("half_even", "half_away") and report.clean, str(report)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
def test_a_truncating_group_quantiser_is_named(dtype):
    def kernel(x):
        m, k = x.shape
        blocks = x.float().view(m, k // 64, 64)
        scale = (blocks.abs().amax(dim=-1) / 127.0).clamp(min=1e-10)
        return (blocks / scale[..., None]).clamp(-128, 127).to(torch.int8).view(m, k), scale

    report = audit(kernel, dtypes=[dtype])
    assert report.rounding == "truncate" and report.layout.startswith("per group of 64")
    assert {finding.check for finding in report.defects} == {"rounding"}


@pytest.mark.parametrize(
    ("limit", "step"), [(127.0, "absmax/127"), (127.5, "absmax/127.5"), (128.0, "absmax/128"), (120.0, "absmax/120")]
)
def test_the_limit_is_found_out_and_ties_with_it(limit, step):
    def kernel(x):
        s, scale = planted.scaled(x, limit)
        return torch.round(s).clamp(-128, 127).to(torch.int8), scale

    report = audit(kernel, dtypes=[torch.float32])
    assert report.figures["step"] == step and report.rounding == "half_even" and report.clean, str(report)
    assert report.figures["exact_ties"] > 500 and report.figures["exact_ties_not_half_even"] == 0
    assert ("limits" in {finding.check for finding in report.findings}) == (limit != 127.0)


def test_a_scale_in_bf16_that_was_used_in_bf16_is_no_defect():
    def kernel(x):
        scale = (x.float().abs().amax(dim=1) / 127.0).to(torch.bfloat16)
        s = torch.nan_to_num(x.float() / scale.float()[:, None])
        return torch.round(s).clamp(-127, 127).to(torch.int8), scale

    report = audit(kernel, dtypes=[torch.bfloat16])
    assert report.clean and report.rounding == "half_even", str(report)
    assert "scale_used" not in {finding.check for finding in report.findings}


def test_a_scale_that_made_no_code_is_found_by_fitting():
    def kernel(x):
        s, scale = planted.scaled(x, 121.3)
        return torch.round(s).to(torch.int8), scale * (121.3 / 127.0)

    report = audit(kernel, dtypes=[torch.float32])
    assert report.rounding == "half_even" and report.figures["step"] == "absmax/121.3 (fitted)"
    assert "scale_used" in {finding.check for finding in report.defects}


def test_what_is_told_is_used():
    def no_scales(x):
        return torch.round(x.float() / 0.25).clamp(-127, 127).to(torch.int8)

    assert audit(no_scales, scales="static:0.25").layout == "static 0.25"
    assert audit(no_scales, scales="static:4", returns="inverse").layout == "static 0.25"
    with pytest.raises(CannotAudit, match="no scales were returned: say --scales static:S"):
        audit(no_scales)
    assert audit(grouped, scales="per-group:32").layout.startswith("per group of 32")
    with pytest.raises(CannotAudit, match=r"scales of shape \[16, 16\] fit no block"):
        audit(grouped, scales="per-row")
    with pytest.raises(CannotAudit, match="do not reproduce the input"):
        audit(planted.half_even, returns="inverse")


@pytest.mark.parametrize(
    ("scales", "returns", "message"),
    [("per-head", None, "cannot read scales 'per-head'"), (None, "sqrt", "unknown meaning of scales 'sqrt'")],
)
def test_bad_options(scales, returns, message):
    with pytest.raises(ValueError, match=message):
        audit(planted.half_even, scales=scales, returns=returns)


def test_random_scales_are_refused():
    with pytest.raises(CannotAudit, match="do not reproduce the input"):
        audit(lambda x: (planted.half_even(x)[0], torch.rand(x.shape[0])))


def test_find_layout_measures_its_error_in_lsb():
    x = torch.randn(16, 512)
    codes, scale = planted.half_even(x)
    _, error = find_layout(x, INT8.index(codes), scale, INT8, Told())
    assert error == pytest.approx(0.8 * 12**-0.5, abs=0.02)  # of the best 80 %


def test_fp8_indices_are_half_steps_apart_and_ties_go_to_even_mantissas():
    every = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert torch.equal(FP8.position(every.double()), torch.arange(127).double())
    middle = (every[:-1].double() + every[1:].double()) / 2
    assert torch.equal(FP8.position(middle), torch.arange(126) + 0.5)
    assert torch.equal(FP8.value(FP8.position(-middle)), -middle)
    nearest = middle.float().to(torch.float8_e4m3fn)
    assert torch.equal(FP8.index(nearest), torch.round(FP8.position(middle)).long())


class PretendsCuda(LocalRunner):
    """PyTorch converts to fp8 correctly on a CPU too: this tests the judgement without a GPU."""

    def run(self, call):
        return perform(self.function, call, "cpu")


def fp8(x, narrow=torch.float32, scale_dtype=torch.float32, shorten=False):
    scale = (x.float().abs().amax(dim=1) / 448.0).clamp(min=1e-12)
    s = (x.float() / scale[:, None]).to(narrow).float().clamp(-448, 448)
    if shorten:  # drop the mantissa bits that fp8 has not
        s = torch.where(
            s.abs() < 2**-6, torch.trunc(s * 512) / 512, (s.view(torch.int32) & -(1 << 20)).view(torch.float)
        )
    return s.to(torch.float8_e4m3fn), scale.to(scale_dtype)


@pytest.mark.parametrize(
    ("options", "rounding"),
    [
        ({}, "half_even"),
        ({"narrow": torch.bfloat16}, "double_rounded"),
        ({"narrow": torch.float16}, "double_rounded"),
        ({"shorten": True}, "truncate"),
    ],
    ids=str,
)
def test_fp8_roundings(options, rounding):
    subject = judge(PretendsCuda(lambda x: fp8(x, **options), "cuda"), torch.float32, Told(), seed=0, shape=(8, 256))
    assert subject.rounding == rounding and subject.grid is FP8
    for check in (*edge_values.CHECKS, *edge_shapes.CHECKS):
        check(subject)
    assert {finding.check for finding in subject.findings if finding.severity == "defect"} <= {"rounding"}


def test_an_fp8_zero_row_of_nan_is_a_defect():
    def no_guard(x):
        scale = x.float().abs().amax(dim=1) / 448.0
        return (x.float() / scale[:, None]).to(torch.float8_e4m3fn), scale

    subject = judge(PretendsCuda(no_guard, "cuda"), torch.bfloat16, Told(), seed=0, shape=(8, 256))
    edge_values.zero_row(subject)
    assert [finding.check for finding in subject.findings] == ["zero_row"]


def test_fp8_is_refused_on_the_cpu():
    with pytest.raises(CannotAudit, match="fp8 is audited on CUDA only"):
        audit(lambda x: (x.to(torch.float8_e4m3fn), torch.ones(())))
