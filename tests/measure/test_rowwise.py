"""The CPU engine equals the reference: codes and counts exactly, sums to 1e-6 of their size."""

import pytest
import torch

from analysis import numerics
from analysis.measure import stats
from analysis.measure.engine import ReferenceEngine, RowwiseEngine, pick_engine
from analysis.measure.replay import Layer, Replay
from analysis.sites import Site

VARIANTS = ["shipped", "fixed", "half_even"]
COUNTS = ("rows", "nonfinite_rows", "zero_rows", "mismatched", "zeroed", "saturated")


def rows_of_every_kind(rows, columns, dtype):
    generator = torch.Generator().manual_seed(rows + columns)
    x = torch.randn(rows, columns, generator=generator) * 3 * torch.rand(rows, 1, generator=generator)
    if rows > 9:
        x[3] = 0
        x[5, 0], x[7, -1] = float("nan"), float("-inf")
        x[8] = 1e-42 if dtype == torch.float32 else 0
        x[9] = torch.arange(columns) % 2 * 254 - 127  # nothing but saturated codes
        x[4, : columns // 2] = (torch.arange(columns // 2) % 100) + 0.5
        x[4, 0] = 127  # ties
    return x.to(dtype)


def layer(columns, out, bias, norm, scale=1.0):
    generator = torch.Generator().manual_seed(columns)
    weight = torch.randn(out, columns, generator=generator) * columns**-0.5 * scale
    b = torch.randn(out, generator=generator) * 0.1 if bias else None
    n = (1 + 0.1 * torch.randn(out, generator=generator), 1e-6) if norm else None
    return Layer(Site("l", 0, "", "", ""), weight, b, n)


def sizes(expected):
    """What a difference is relative to: the sum itself, or for signed sums their Cauchy bound."""
    at = {name: expected[..., i] for i, name in enumerate(stats.ALL_SUMS)}
    bounds = {
        "sum_ey": (at["sum_ee"] * at["sum_yy"]).sqrt(),
        "sum_ez": (at["sum_ee"] * at["sum_zz"]).sqrt(),
        "sum_magnitude_error": at["sum_square_error"],
    }
    return torch.stack([bounds.get(name, at[name]) for name in stats.ALL_SUMS], dim=-1)


def assert_sums_agree(found, expected):
    difference = (found - expected).abs() / sizes(expected).clamp(min=1e-300)
    difference = torch.where(found == expected, 0.0, difference)
    for i, name in enumerate(stats.ALL_SUMS):
        limit = 0.0 if name in COUNTS else 1e-6
        assert difference[..., i].max() <= limit, f"{name}: {difference[..., i].max():.1e}"


@pytest.mark.parametrize("reference", ["bf16", "as_run", "fp64"])
@pytest.mark.parametrize(("bias", "norm"), [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize(
    ("rows", "columns", "dtype"),
    [(1, 1, torch.float32), (17, 1000, torch.float32), (300, 256, torch.bfloat16), (999, 48, torch.float16),
     (0, 8, torch.float32), (65, 3072, torch.float32), (1100, 256, torch.float32)],
)  # fmt: skip
def test_sums_are_the_references(rows, columns, dtype, bias, norm, reference):
    x = rows_of_every_kind(rows, columns, dtype)
    groups = torch.randint(0, 3, (rows,), dtype=torch.uint8)
    lay = layer(columns, 33, bias, norm)
    output = numerics.bf16_linear(x, lay.weight, lay.bias).float() if reference == "as_run" else None
    found, expected = (
        Replay(VARIANTS, reference, engine=engine).measure(lay, x, output, groups) for engine in ("auto", "reference")
    )
    assert_sums_agree(found, expected)


def test_another_kernel_would_not_pass():
    x, lay = rows_of_every_kind(64, 256, torch.float32), layer(256, 33, True, True)
    found = Replay(["shipped"]).measure(lay, x)
    expected = Replay(["fixed"], engine="reference").measure(lay, x)
    with pytest.raises(AssertionError):
        assert_sums_agree(found, expected)


@pytest.mark.parametrize("variants", [["shipped"], ["fixed"], ["floor_half", "fixed"], ["fixed", "floor", "shipped"]])
@pytest.mark.parametrize("zeros", [False, True])
def test_any_choice_of_variants(variants, zeros):
    generator = torch.Generator().manual_seed(1)
    x, lay = torch.randn(70, 256, generator=generator), layer(256, 33, False, True)
    if zeros:
        x[:, ::5] = 0
    found, expected = (Replay(variants, engine=engine).measure(lay, x) for engine in ("auto", "reference"))
    assert_sums_agree(found, expected)


def test_scratch_is_shared_by_shapes_and_holds_nothing_over():
    replay, expected = Replay(VARIANTS), Replay(VARIANTS, engine="reference")
    for rows, columns, out in ((17, 48, 96), (1500, 256, 300), (17, 48, 96), (400, 1000, 40), (1500, 256, 300)):
        x, lay = rows_of_every_kind(rows, columns, torch.float32), layer(columns, out, True, rows == 17)
        assert_sums_agree(replay.measure(lay, x), expected.measure(lay, x))


def test_inference_mode_may_come_and_go():
    replay, x, lay = Replay(VARIANTS), rows_of_every_kind(17, 48, torch.float32), layer(48, 33, True, True)
    with torch.inference_mode():
        first = replay.measure(lay, x)
    second = replay.measure(lay, x)
    with torch.inference_mode():
        assert torch.equal(first, second) and torch.equal(replay.measure(lay, x), first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_and_products_are_the_references_to_the_bit(dtype):
    x, lay = rows_of_every_kind(200, 256, dtype), layer(256, 64, True, False)
    groups = torch.ones(200, dtype=torch.uint8)
    engines = (pick_engine(VARIANTS, "cpu"), pick_engine(VARIANTS, "cpu", "reference"))
    assert isinstance(engines[0], RowwiseEngine) and isinstance(engines[1], ReferenceEngine)
    ours, theirs = (e.quantize(x, groups) for e in engines)
    weight = numerics.quantize_weight(lay.weight)
    for i in range(len(VARIANTS)):
        assert torch.equal(ours.codes[i], theirs.codes[i])
        assert torch.equal(ours.scales[i].nan_to_num(-1), theirs.scales[i].nan_to_num(-1))
        products = [e.int8_linear(q.codes[i], q.scales[i], *weight, lay.bias) for e, q in zip(engines, (ours, theirs), strict=True)]  # fmt: skip  # noqa: E501
        assert torch.equal(products[0].nan_to_num(7), products[1].nan_to_num(7))
    assert torch.equal(ours.groups, theirs.groups) and torch.equal(ours.x_bf16[:3], theirs.x_bf16[:3])


def test_every_half_that_rounds_is_exact():
    """The trick behind `fixed` on every fp32 value near a decision, scaled so that s is the value itself."""
    halves = torch.arange(-126, 126).float() + 0.5
    near = torch.cat(
        [halves, torch.nextafter(halves, torch.tensor(999.0)), torch.nextafter(halves, torch.tensor(-999.0))]
    )
    x = torch.cat([torch.tensor([127.0]), near, torch.tensor([0.0, -0.0, 0.49999997, 1e-30])])[None]
    codes = RowwiseEngine(["fixed"], [None]).quantize(x, torch.ones(1, dtype=torch.uint8)).codes[0]
    assert torch.equal(codes, numerics.quantize_rows(x, numerics.Rounding.FIXED)[0])
