"""What measuring costs: per layer and per forward pass, medians taken in turn so that ratios mean something.

    times = alternate({"plain": run, "measured": measured_run}, device="cuda", repeats=20)
    times["measured"].median_s / times["plain"].median_s

    report = bench_layer(17600, 3072, 3072, device="cuda")      # ValueError if the measurement's results are wrong

Nothing is reported on wrong results: before timing, the sums are compared with the fp64 reference on the same tensors.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from analysis import numerics
from analysis.measure import stats
from analysis.measure.replay import Layer, Replay
from analysis.sites import Site

TOLERANCE = 1e-3  # relative; `shipped` may flip a few codes in 1e5 on a GPU, which moves its sums by about 1e-5
CHECKED = ("rows", "sum_yy", "sum_ee", "sum_ey", "sum_zz", "sum_eff_ee", "sum_square_error", "sum_magnitude_error")
FLUSH_BYTES = 256 * 2**20  # written between runs on a GPU, so that inputs do not sit in its cache from the last one


@dataclass(frozen=True)
class Timing:
    """Seconds of one function: median and quartiles over `repeats` runs."""

    median_s: float
    low_s: float
    high_s: float
    repeats: int


def alternate(
    functions: Mapping[str, Callable[[], Any]],
    device: torch.device | str,
    repeats: int,
    warmup: int = 2,
    flush: bool = False,
) -> dict[str, Timing]:
    """Time several functions in turn, round after round: a drift of the clock reaches all of them alike.

    On a GPU by CUDA events around each run, with the queue empty at its start; `flush` empties its cache too.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    cuda = torch.device(device).type == "cuda"
    scratch = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device) if cuda and flush else None
    for function in functions.values():
        for _ in range(warmup):
            function()
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            if scratch is not None:
                scratch.zero_()
            seconds[name].append(_on_gpu(function) if cuda else _on_cpu(function))
    return {name: timing(values) for name, values in seconds.items()}


def _on_gpu(function: Callable[[], Any]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    function()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def _on_cpu(function: Callable[[], Any]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def timing(seconds: Sequence[float]) -> Timing:
    """Median and quartiles of seconds."""
    ordered = sorted(seconds)
    quarter = len(ordered) // 4
    return Timing(statistics.median(ordered), ordered[quarter], ordered[-1 - quarter], len(ordered))


class PlainReplay(Replay):
    """The same measurement as anybody would write it in a hook: plain PyTorch in fp32, nothing shared or fused.

    Its int8 products are this project's on a GPU (PyTorch has none with scales), so that what differs is the rest.
    """

    def measure(
        self,
        layer: Layer,
        x: Tensor,
        output: Tensor | None = None,
        groups: Tensor | None = None,
        plain: bool = False,
    ) -> Tensor:
        """fp32 sums [V, 2, 17]; those that take a norm are left 0."""
        engine = self.engine_for(x.device.type)
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            flat = x.reshape(-1, x.shape[-1])
            y = numerics.bf16_linear(flat, layer.weight, layer.bias).float()
            z = y if layer.bias is None else y - layer.bias.float()
            s = numerics.scaled(flat)
            weight = engine.quantize_weight(layer.weight)
            out = torch.zeros(len(self.variants), 2, len(stats.ALL_SUMS), device=x.device)
            for i, variant in enumerate(self.variants):
                codes, scales = numerics.quantize_rows(flat, numerics.parse_rounding(variant))
                e = engine.int8_linear(codes, scales, *weight, layer.bias).float() - y
                error = codes.float() - s
                values = {
                    "rows": torch.tensor(float(len(flat)), device=x.device),
                    "sum_magnitude_error": (codes.float().abs() - s.abs()).sum(),
                    "sum_square_error": (error * error).sum(),
                    "mismatched": (error.abs() > 0.5).sum(),
                    "zeroed": ((codes == 0) & (flat != 0)).sum(),
                    "saturated": (codes.float().abs() == numerics.CODE_MAX).sum(),
                    "sum_yy": (y * y).sum(),
                    "sum_ee": (e * e).sum(),
                    "sum_ey": (e * y).sum(),
                    "sum_zz": (z * z).sum(),
                    "sum_ez": (e * z).sum(),
                    "max_abs_e": e.abs().max(),
                }
                out[i, 0] = torch.stack(
                    [values.get(name, torch.zeros((), device=x.device)).float() for name in stats.ALL_SUMS]
                )
        return out.double()


def random_layer(rows: int, in_features: int, out_features: int, device: str, seed: int = 0) -> tuple[Layer, Tensor]:
    """A bf16 layer with a norm behind it, and an input of that many rows with rows of unequal size. Seeded."""
    generator = torch.Generator(device).manual_seed(seed)

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device)

    weight = (randn(out_features, in_features) * in_features**-0.5).bfloat16()
    norm = (1 + 0.1 * randn(out_features)).bfloat16()
    x = randn(rows, in_features) * (0.5 + torch.rand(rows, 1, generator=generator, device=device))
    site = Site("bench", 0, "self", "q", "")
    return Layer(site, weight, (0.1 * randn(out_features)).bfloat16(), (norm, 1e-6)), x


def check_sums(found: Tensor, expected: Tensor, variants: Sequence[str], what: str) -> float:
    """Largest difference of the checked sums [V, 2, 17], relative to their size; signed sums, to a Cauchy bound.

    Raises ValueError where it exceeds the tolerance.
    """
    worst = 0.0
    tables = [
        [dict(zip(stats.ALL_SUMS, row, strict=True)) for row in sums[:, 0].tolist()] for sums in (found, expected)
    ]
    for variant, a, b in zip(variants, *tables, strict=True):
        sizes = b | {
            "sum_ey": (b["sum_ee"] * b["sum_yy"]) ** 0.5,
            # Its Cauchy bound over rows, or its own size: that of truncation grows with the elements of a row.
            "sum_magnitude_error": max(abs(b["sum_magnitude_error"]), (b["sum_square_error"] * b["rows"]) ** 0.5),
        }
        for name in CHECKED:
            difference = abs(a[name] - b[name]) / max(sizes[name], 1e-30)
            if not difference <= TOLERANCE:
                raise ValueError(
                    f"refusing to report times: {what}'s {name} of {variant!r} is {a[name]:.6g}, the reference says "
                    f"{b[name]:.6g}; the kernels are wrong on this device, run the tests"
                )
            worst = max(worst, difference)
    return worst


def bench_layer(
    rows: int,
    in_features: int,
    out_features: int,
    device: str,
    variants: Sequence[str] = ("shipped", "fixed"),
    repeats: int = 20,
    compare_plain: bool = True,
) -> dict[str, Any]:
    """One layer's replay beside its GEMMs alone and plain PyTorch.

    Returns times in seconds and ratios to the sum of the GEMMs (one bf16, one int8 a variant, without weight codes).

    Raises ValueError when the measurement's sums are not the fp64 reference's.
    """
    layer, x = random_layer(rows, in_features, out_features, device)
    replay = Replay(variants, device=device)
    engine = replay.engine
    found = replay.measure(layer, x)
    replay.forget()
    worst = check_sums(found, Replay(variants, device=device, engine="reference").measure(layer, x), variants, "replay")
    quantized = engine.quantize(x, torch.ones(rows, dtype=torch.uint8, device=device))
    weight = engine.quantize_weight(layer.weight)
    x_bf16 = x.bfloat16()

    def fresh() -> None:
        replay.forget()
        replay.measure(layer, x)

    def shared() -> None:
        replay.measure(layer, x)

    def gemms() -> None:
        numerics.bf16_linear(x_bf16, layer.weight, layer.bias)
        for codes, scales in zip(quantized.codes, quantized.scales, strict=True):
            engine.int8_linear(codes, scales, *weight, layer.bias)

    functions: dict[str, Callable[[], Any]] = {"replay": fresh, "replay, input shared": shared, "GEMMs alone": gemms}
    functions |= {
        "bf16 GEMM": lambda: numerics.bf16_linear(x_bf16, layer.weight, layer.bias),
        "int8 GEMM": lambda: engine.int8_linear(quantized.codes[0], quantized.scales[0], *weight, layer.bias),
        "quantise": lambda: engine.quantize(x, quantized.groups),
        "weight codes": lambda: engine.quantize_weight(layer.weight),
    }
    if compare_plain and set(variants) <= {"shipped", "fixed"}:
        naive = PlainReplay(variants, device=device)
        functions["plain PyTorch"] = lambda: naive.measure(layer, x)
    times = alternate(functions, device, repeats, flush=True)
    base = times["GEMMs alone"].median_s
    return {
        "rows": rows,
        "in_features": in_features,
        "out_features": out_features,
        "engine": engine.name,
        "largest_difference": worst,
        "times": {name: asdict(timing) for name, timing in times.items()},
        "ratio_to_gemms": {name: timing.median_s / base for name, timing in times.items()},
    }
