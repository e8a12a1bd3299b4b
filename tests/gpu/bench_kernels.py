"""Times of the Triton kernels on a CUDA device, beside what they are compared with. Refuses to report on wrong results.

    python tests/gpu/bench_kernels.py --out kernels.json [--sweep]

CUDA events, median; inputs rotate among sets that together exceed the L2 cache; the queue is filled before the clock
starts, so launches cost nothing. `--sweep` also times other block shapes. Units: microseconds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from analysis import numerics
from analysis.kernels import error_sums, gemm, pair, quantize, weight
from analysis.kernels.gemm import Blocks
from analysis.measure import stats
from analysis.numerics import Rounding

WIDTH = 3072
ROWS = (17600, 4400, 512)
L2_BYTES = 150e6  # more than twice the largest L2
BOTH = (Rounding.SHIPPED, Rounding.FIXED)
GEMM_SWEEP = [
    Blocks(256, 128, 128, 8, 3),
    Blocks(128, 256, 128, 8, 3),
    Blocks(128, 128, 128, 8, 3),
    Blocks(128, 128, 128, 4, 3),
    Blocks(256, 128, 128, 8, 3, tma=True),
    Blocks(256, 128, 128, 8, 4, tma=True),
    Blocks(128, 256, 128, 8, 3, tma=True),
    Blocks(128, 256, 128, 8, 4, tma=True),
    Blocks(128, 128, 128, 8, 3, tma=True),
    Blocks(128, 128, 128, 4, 3, tma=True),
]
PAIR_SWEEP = [Blocks(128, 128, 128, 8, 3), Blocks(64, 256, 128, 8, 3), Blocks(128, 128, 64, 8, 4)]
ROW_SWEEP = [(1, 256), (2, 512), (4, 1024)]  # warps, columns a step


class Layer:
    """One q/k/v/o layer with its input, codes, outputs: everything a timed call may read."""

    def __init__(self, rows: int, seed: int) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device="cuda")

        self.x = normal(rows, WIDTH) * torch.exp(normal(1, WIDTH) / 2)
        self.x_bf16 = self.x.bfloat16()
        self.w = (normal(WIDTH, WIDTH) / WIDTH**0.5).bfloat16()
        self.bias = (normal(WIDTH) / 10).bfloat16()
        self.norm = (1 + normal(WIDTH) / 10).bfloat16(), 1e-6
        self.groups = (1 + (torch.arange(rows, device="cuda") > 0.95 * rows)).to(torch.uint8)
        self.b, self.b_scales = weight.quantize_weight(self.w)
        self.y = numerics.bf16_linear(self.x_bf16, self.w, self.bias)
        done = quantize.quantize_pass(self.x, BOTH, self.groups)
        self.codes, self.scales = done.codes, done.scales
        self.yqs = [self.gemm(i) for i in range(2)]

    def gemm(self, variant: int, blocks: Blocks | None = None) -> Tensor:
        a, a_scales = self.codes[variant], self.scales[variant]
        return gemm.int8_linear(a, a_scales, self.b, self.b_scales, self.bias, blocks=blocks)

    def sums(self) -> Tensor:
        return error_sums.output_sums(self.yqs, self.y, self.bias, self.groups, self.norm)

    def pair(self, blocks: Blocks | None = None) -> Tensor:
        operands = (self.codes[0], self.scales[0], self.codes[1], self.scales[1], self.b, self.b_scales, self.bias)
        return pair.pair_error_sums(*operands, self.y, self.groups, self.norm, blocks=blocks)

    def naive_sums(self) -> list[Tensor]:
        """The same sums by PyTorch operations in fp32, one variant after the other."""
        y = self.y.float()
        z, ny = y - self.bias.float(), stats.rms_norm(y, self.norm)
        out = []
        for yq in self.yqs:
            e = yq.float() - y
            effective = stats.rms_norm(yq.float(), self.norm) - ny
            out += [(y * y).sum(), (e * e).sum(), (e * y).sum(), (z * z).sum(), (e * z).sum(), e.abs().max()]
            out += [(ny * ny).sum(), (effective * effective).sum()]
        return out


def close(actual: Tensor, expected: Tensor, what: str) -> None:
    """Sums [V, 2, 8] to 1e-6 (effective error: 1e-5), signed ones relative to the sums that bound them."""
    scale = expected.abs()
    scale[..., 2] = (expected[..., 0] * expected[..., 1]).sqrt()
    scale[..., 4] = (expected[..., 3] * expected[..., 1]).sqrt()
    tolerance = torch.tensor([1e-6] * 7 + [1e-5], dtype=torch.float64, device=actual.device)
    require(bool(((actual - expected).abs() <= tolerance * scale).all()), what)


def require(right: bool, what: str) -> None:
    if not right:
        raise SystemExit(f"refused: {what} is wrong; no times are reported on wrong results")


def verify(layer: Layer, sweep: bool) -> dict[str, Any]:
    """Every kernel against its reference, at this size. Returns what is worth recording."""
    codes, scales = numerics.quantize_rows(layer.x, Rounding.FIXED)
    require(torch.equal(codes, layer.codes[1]) and torch.equal(scales, layer.scales[1]), "fixed")
    truncated, _ = numerics.quantize_rows(layer.x, Rounding.SHIPPED)
    differ = truncated != layer.codes[0]
    s = numerics.scaled(layer.x)
    require(bool(((s - s.round()).abs()[differ] < 1e-4).all()) and float(differ.float().mean()) < 1e-4, "shipped")
    w_codes, w_scales = numerics.quantize_weight(layer.w)
    require(torch.equal(w_codes, layer.b) and torch.equal(w_scales, layer.b_scales), "weight quantiser")
    for i, yq in enumerate(layer.yqs):
        operands = (layer.codes[i], layer.scales[i], layer.b, layer.b_scales, layer.bias)
        require(torch.equal(yq, numerics.int8_linear(*operands)), "int8 linear")
    expected = stats.output_sums(layer.yqs, layer.y, layer.bias, layer.groups, layer.norm)
    close(layer.sums(), expected, "output sums")
    close(layer.pair(), expected, "pair sums")
    for blocks in GEMM_SWEEP if sweep else []:
        require(torch.equal(layer.gemm(0, blocks), layer.yqs[0]), f"int8 linear with {blocks}")
    for blocks in PAIR_SWEEP if sweep else []:
        close(layer.pair(blocks), expected, f"pair with {blocks}")
    return {"shipped_codes_off_ieee": int(differ.sum()), "codes": differ.numel()}


def median_us(call: Callable[[Layer], Any], layers: list[Layer], repeats: int = 30) -> float:
    """Median device time of `call` over rotating layers."""
    for layer in layers[:2]:
        call(layer)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000)  # about 10 ms: the host gets ahead of the device
    for i, (start, stop) in enumerate(events):
        start.record()
        call(layers[i % len(layers)])
        stop.record()
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(stop) * 1e3 for start, stop in events)
    return times[len(times) // 2]


def row_shapes(module: Any, call: Callable[[Layer], Any], layers: list[Layer]) -> Iterable[tuple[str, float]]:
    """Times of a row kernel with other warps and steps."""
    kept = module.WARPS, module.BLOCK
    for module.WARPS, module.BLOCK in ROW_SWEEP:
        yield f"{module.WARPS} warps, {module.BLOCK} columns", median_us(call, layers)
    module.WARPS, module.BLOCK = kept


def measure(rows: int, sweep: bool) -> dict[str, Any]:
    first = Layer(rows, 0)
    checked = verify(first, sweep)
    count = max(3, min(12, int(L2_BYTES / (first.x.nbytes + first.w.nbytes)) + 1))
    layers = [first, *(Layer(rows, seed) for seed in range(1, count))]
    calls: dict[str, Callable[[Layer], Any]] = {
        "bf16 linear": lambda v: numerics.bf16_linear(v.x_bf16, v.w, v.bias),
        "int8_linear": lambda v: v.gemm(0),
        "torch._int_mm": lambda v: torch._int_mm(v.codes[0], v.b.t()),
        "quantize_rows shipped, bf16": lambda v: quantize.quantize_rows(v.x_bf16, Rounding.SHIPPED),
        "quantize_rows fixed, bf16": lambda v: quantize.quantize_rows(v.x_bf16, Rounding.FIXED),
        "quantize_rows shipped, fp32": lambda v: quantize.quantize_rows(v.x, Rounding.SHIPPED),
        "quantize_rows fixed, fp32": lambda v: quantize.quantize_rows(v.x, Rounding.FIXED),
        "quantize_pass, bf16": lambda v: quantize.quantize_pass(v.x_bf16, BOTH, v.groups),
        "quantize_pass, fp32": lambda v: quantize.quantize_pass(v.x, BOTH, v.groups),
        "quantize_weight": lambda v: weight.quantize_weight(v.w),
        "output_sums, norm": lambda v: v.sums(),
        "output_sums": lambda v: error_sums.output_sums(v.yqs, v.y, v.bias, v.groups, None),
        "naive sums, norm": lambda v: v.naive_sums(),
        "pair_error_sums, norm": lambda v: v.pair(),
    }
    us = {name: median_us(call, layers) for name, call in calls.items()}
    us["int8_linear again"] = median_us(calls["int8_linear"], layers)
    out: dict[str, Any] = {"rows": rows, "sets": count, "us": us, "verified": checked, "cost_ratio": ratios(us)}
    if sweep:
        out["gemm_sweep"] = [
            asdict(blocks) | {"us": median_us(lambda v, b=blocks: v.gemm(0, b), layers)} for blocks in GEMM_SWEEP
        ]
        out["pair_sweep"] = [
            asdict(blocks) | {"us": median_us(lambda v, b=blocks: v.pair(b), layers)} for blocks in PAIR_SWEEP
        ]
        out["pass_sweep"] = dict(row_shapes(quantize, calls["quantize_pass, fp32"], layers))
        out["pass_sweep_bf16"] = dict(row_shapes(quantize, calls["quantize_pass, bf16"], layers))
        out["sums_sweep"] = dict(row_shapes(error_sums, calls["output_sums, norm"], layers))
    return out


def ratios(us: dict[str, float]) -> dict[str, float]:
    """A layer's measurement over the sum of its bf16 and two int8 products."""
    products = us["bf16 linear"] + 2 * us["int8_linear"]
    steps = us["output_sums, norm"] + us["quantize_weight"]
    return {
        "pass for every layer, fp32": (products + steps + us["quantize_pass, fp32"]) / products,
        "pass for every layer, bf16": (products + steps + us["quantize_pass, bf16"]) / products,
        "pass shared by q, k, v, fp32": (products + steps + us["quantize_pass, fp32"] / 3) / products,
        "the same, fused pair": (
            us["bf16 linear"] + us["pair_error_sums, norm"] + us["quantize_weight"] + us["quantize_pass, fp32"] / 3
        ) / products,
    }  # fmt: skip


def copy_gb_per_s() -> float:
    a, b = (torch.empty(2**30, dtype=torch.uint8, device="cuda") for _ in range(2))
    a.random_()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(11)]
    for event in events:
        event.record()
        b.copy_(a)
    torch.cuda.synchronize()
    times = sorted(p.elapsed_time(q) for p, q in pairwise(events))
    return 2 * a.numel() / times[len(times) // 2] / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--sweep", action="store_true", help="also time other block shapes")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    options = parser.parse_args()
    record: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "copy_gb_per_s": copy_gb_per_s(),
        "sizes": [],
    }
    print(f"{record['device']}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"device copy: {record['copy_gb_per_s']:.0f} GB/s read + written")
    for i, rows in enumerate(options.rows):
        size = measure(rows, options.sweep and i < 2)
        record["sizes"].append(size)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(record, indent=1) + "\n")
        print(f"\n{rows} x {WIDTH} x {WIDTH}: {size['verified']}")
        for name, us in size["us"].items():
            print(f"  {name:<30} {us:9.1f} us")
        for name, ratio in size["cost_ratio"].items():
            print(f"  cost, {name:<30} {ratio:6.3f}")
        for key in ("gemm_sweep", "pair_sweep"):
            for row in size.get(key, []):
                print(
                    f"  {key}: " + " ".join(f"{k}={v}" for k, v in row.items() if k != "us") + f" {row['us']:9.1f} us"
                )
        for key in ("pass_sweep", "pass_sweep_bf16", "sums_sweep"):
            for name, us in size.get(key, {}).items():
                print(f"  {key}: {name:<26} {us:9.1f} us")


if __name__ == "__main__":
    main()
