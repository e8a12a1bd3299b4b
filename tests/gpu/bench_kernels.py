"""Times of the Triton kernels on a CUDA device, beside what they are compared with. Refuses to report on wrong results.

    python tests/gpu/bench_kernels.py --out kernels.json [--sweep]

Timed by `analysis.measure.kernel_bench`: inputs rotate among sets that together exceed the L2 cache, and the queue is
filled before the clock starts, so that launches cost nothing. `--sweep` also times other block shapes. Units: µs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from analysis import numerics
from analysis.kernels import error_sums, gemm, quantize, weight
from analysis.kernels.gemm import Blocks
from analysis.measure import stats
from analysis.measure.kernel_bench import FEATURES as WIDTH
from analysis.measure.kernel_bench import SITES, copy_gb_per_s, sets_needed, time_in_turn
from analysis.numerics import Rounding

ROUNDS = 10
BOTH = (Rounding.SHIPPED, Rounding.FIXED)
GEMM_SWEEP = [
    Blocks(256, 128, 128, 8, 3),
    Blocks(128, 256, 128, 8, 3),
    Blocks(128, 128, 128, 8, 3),
    Blocks(128, 128, 128, 4, 3),
]
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
    for blocks in GEMM_SWEEP if sweep else []:
        require(torch.equal(layer.gemm(0, blocks), layer.yqs[0]), f"int8 linear with {blocks}")
    return {"shipped_codes_off_ieee": int(differ.sum()), "codes": differ.numel()}


def median_us(call: Callable[[Layer], Any], layers: list[Layer]) -> float:
    """Median device time of `call` over rotating layers."""
    return 1e6 * statistics.median(time_in_turn({"": call}, layers, "cuda", ROUNDS)[""])


def row_shapes(module: Any, call: Callable[[Layer], Any], layers: list[Layer]) -> Iterable[tuple[str, float]]:
    """Times of a row kernel with other warps and steps."""
    kept = module.WARPS, module.BLOCK
    for module.WARPS, module.BLOCK in ROW_SWEEP:
        yield f"{module.WARPS} warps, {module.BLOCK} columns", median_us(call, layers)
    module.WARPS, module.BLOCK = kept


def measure(rows: int, sweep: bool) -> dict[str, Any]:
    first = Layer(rows, 0)
    checked = verify(first, sweep)
    count = sets_needed(first.x.nbytes + first.w.nbytes, "cuda", most=12)
    layers = [first, *(Layer(rows, seed) for seed in range(1, count))]
    calls: dict[str, Callable[[Layer], Any]] = {
        "bf16 linear": lambda v: numerics.bf16_linear(v.x_bf16, v.w, v.bias),
        "int8_linear": lambda v: v.gemm(0),
        "int8_linears": lambda v: gemm.int8_linears(v.codes, v.scales, v.b, v.b_scales, v.bias),
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
    }
    us = {name: median_us(call, layers) for name, call in calls.items()}
    us["int8_linear again"] = median_us(calls["int8_linear"], layers)
    out: dict[str, Any] = {"rows": rows, "sets": count, "us": us, "verified": checked, "cost_ratio": ratios(us)}
    if sweep:
        out["gemm_sweep"] = [
            asdict(blocks) | {"us": median_us(lambda v, b=blocks: v.gemm(0, b), layers)} for blocks in GEMM_SWEEP
        ]
        out["pass_sweep"] = dict(row_shapes(quantize, calls["quantize_pass, fp32"], layers))
        out["pass_sweep_bf16"] = dict(row_shapes(quantize, calls["quantize_pass, bf16"], layers))
        out["sums_sweep"] = dict(row_shapes(error_sums, calls["output_sums, norm"], layers))
    return out


def ratios(us: dict[str, float]) -> dict[str, float]:
    """A layer's measurement over the sum of its bf16 and two int8 products."""
    products = us["bf16 linear"] + us["int8_linears"]
    steps = us["output_sums, norm"] + us["quantize_weight"]
    return {
        "pass for every layer, fp32": (products + steps + us["quantize_pass, fp32"]) / products,
        "pass for every layer, bf16": (products + steps + us["quantize_pass, bf16"]) / products,
        "pass shared by q, k, v, fp32": (products + steps + us["quantize_pass, fp32"] / 3) / products,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--sweep", action="store_true", help="also time other block shapes")
    parser.add_argument("--rows", type=int, nargs="+", default=list(SITES))
    options = parser.parse_args()
    record: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "copy_gb_per_s": copy_gb_per_s("cuda"),
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
        for row in size.get("gemm_sweep", []):
            print(
                "  gemm_sweep: " + " ".join(f"{k}={v}" for k, v in row.items() if k != "us") + f" {row['us']:9.1f} us"
            )
        for key in ("pass_sweep", "pass_sweep_bf16", "sums_sweep"):
            for name, us in size.get(key, {}).items():
                print(f"  {key}: {name:<26} {us:9.1f} us")


if __name__ == "__main__":
    main()
