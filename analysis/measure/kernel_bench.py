"""Row quantisers against the clock, over the shapes of a model: is the fix free?

    record = bench_quantizers("cuda")            # ValueError where a quantiser's codes are not the contract's
    record["shapes"][0]["ratio"]                 # {"median": .., "low": .., "high": ..}: fixed / shipped

One round times every quantiser once, in an order that changes from round to round, and gives one ratio; the interval is
that of the median over rounds. `shipped` is timed twice: its ratio to itself is what the method cannot tell from 1.
A timed run is one call on each of several inputs, which together exceed the L2 cache of a GPU; on a GPU the queue is
filled before the clock starts, so that launches cost nothing. Times are seconds a call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from analysis import numerics
from analysis.kernels import registry
from analysis.measure.bench import timing
from analysis.numerics import Rounding

FEATURES = 3072
SITES = {  # rows of Matrix-Game-3.0's projections -> which ones they are
    17600: "self q, k, v, o and cross q, o at 704x1280",
    4400: "self q, k, v, o and cross q, o at 352x640",
    512: "cross k, v",
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CPU_ROWS = (512,)
AGAIN = "shipped, again"
ROUNDS = 72
PRODUCT_ROUNDS = 5
L2_BYTES = 150e6  # more than twice the largest L2
FEWEST_SETS, MOST_SETS = 3, 48
DRAWS, SEED = 2000, 0
NEAR_BOUNDARY, FEW_CODES = 1e-4, 1e-4  # where and how often an approximate division may move a code
SCALE_TOLERANCE = 1e-6
SLEEP_CYCLES_S = 2e9  # cycles a second of a fast GPU: a slower one sleeps longer, which is safe
MOST_SLEEP_S = 0.05

Input = TypeVar("Input")


@dataclass(frozen=True)
class Ratio:
    """Median over rounds, its 95 % bootstrap interval, and the quartiles of single rounds."""

    median: float
    low: float
    high: float
    quartile_low: float
    quartile_high: float


def time_in_turn(
    calls: Mapping[str, Callable[[Input], Any]], inputs: Sequence[Input], device: str, rounds: int
) -> dict[str, list[float]]:
    """Seconds a call, [rounds] for each function: the mean over `inputs`, functions taken in turn.

    Each comes first, last and in between equally often, and always after another one. Results stay alive while a
    function runs, so that no two of its calls write to the same memory; the next one gets that memory.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    if not inputs:
        raise ValueError("nothing to time: no inputs")
    for call in calls.values():
        for x in inputs[:2]:
            call(x)
    timed = _Queue(device) if torch.device(device).type == "cuda" else _clock
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        names = _order(list(calls), number)
        for name, value in zip(names, timed([calls[name] for name in names], inputs), strict=True):
            seconds[name].append(value / len(inputs))
    return seconds


def _order(names: list[str], number: int) -> list[str]:
    """The names rotated, and backwards in every other turn of the rotation."""
    at = number % len(names)
    rotated = names[at:] + names[:at]
    return rotated if number // len(names) % 2 == 0 else rotated[::-1]


def _clock(calls: Sequence[Callable[[Input], Any]], inputs: Sequence[Input]) -> list[float]:
    seconds = []
    for call in calls:
        started = time.perf_counter()
        kept = [call(value) for value in inputs]
        seconds.append(time.perf_counter() - started)
        del kept
    return seconds


class _Queue:
    """Times functions by CUDA events behind a sleep of the device, long enough for the host to get ahead of it.

    Where the device catches up with the host, the round is repeated behind a longer sleep, up to a limit: a function
    that waits for the device can never get ahead, and its time is what it costs its caller.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.sleep_s = 0.005

    def __call__(self, calls: Sequence[Callable[[Input], Any]], inputs: Sequence[Input]) -> list[float]:
        with torch.cuda.device(self.device):
            while True:
                events = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
                torch.cuda.synchronize()
                torch.cuda._sleep(int(self.sleep_s * SLEEP_CYCLES_S))
                calls[-1](inputs[-1])  # the first timed call too comes after another one
                events[0].record()
                for call, event in zip(calls, events[1:], strict=True):
                    kept = [call(value) for value in inputs]
                    event.record()
                    del kept
                ahead = not events[0].query()
                torch.cuda.synchronize()
                if ahead or self.sleep_s >= MOST_SLEEP_S:
                    return [start.elapsed_time(stop) / 1000 for start, stop in pairwise(events)]
                self.sleep_s *= 2


def copy_gb_per_s(device: str, repeats: int = 10) -> float:
    """Bytes read and written a second by the device's own copy, in GB/s: median over copies beyond any cache."""
    size = 2**30 if torch.device(device).type == "cuda" else 2**26
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    seconds = time_in_turn({"copy": target.copy_}, [source.random_()], device, repeats)["copy"]
    return 2 * size / float(np.median(seconds)) / 1e9


def sets_needed(bytes_of_one: int, device: str, fewest: int = FEWEST_SETS, most: int = MOST_SETS) -> int:
    """How many inputs of that size a timed run goes through so that none is found in the cache; few on a CPU."""
    if torch.device(device).type != "cuda":
        return 2
    return max(fewest, min(most, int(L2_BYTES / bytes_of_one) + 1))


def random_rows(rows: int, features: int, dtype: torch.dtype, device: str, seed: int) -> Tensor:
    """[rows, features]: Gaussian, with features of unequal size. Seeded."""
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(rows, features, generator=generator, device=device)
    return (x * torch.exp(torch.randn(1, features, generator=generator, device=device) / 2)).to(dtype)


def ratio_of(times: Sequence[float], base: Sequence[float]) -> Ratio:
    """times / base, round by round: see `Ratio`."""
    ratios = np.asarray(times) / np.asarray(base)
    drawn = np.random.default_rng(SEED).integers(len(ratios), size=(DRAWS, len(ratios)))
    low, high = np.quantile(np.median(ratios[drawn], axis=1), [0.025, 0.975])
    quartiles = np.quantile(ratios, [0.25, 0.75])
    return Ratio(float(np.median(ratios)), float(low), float(high), *map(float, quartiles))


def difference(quantize: registry.Quantizer, x: Tensor, rounding: Rounding) -> tuple[str, int]:
    """(what is wrong or '', codes that differ) of a quantiser against the contract's rounding on x [M, K].

    A differing code is right where it is off by one beside a decision boundary, as an approximate division leaves it.
    """
    codes, scales = quantize(x)
    expected, expected_scales = numerics.quantize_rows(x, rounding)
    off = codes.int() - expected.int()
    at = off != 0
    count = int(at.sum())
    if not bool(((scales - expected_scales).abs() <= SCALE_TOLERANCE * expected_scales).all()):
        return "scales", count
    s = numerics.scaled(x)[at]
    boundary = s.round() if rounding in (Rounding.SHIPPED, Rounding.FLOOR) else s.floor() + 0.5
    beside = bool(((s - boundary).abs() <= NEAR_BOUNDARY).all())
    if not beside or int(off.abs().max()) > 1:
        return _differ(count, x), count
    return "", count


def _differ(count: int, x: Tensor) -> str:
    return f"codes ({count} of {x.numel()} differ)"


def check(name: str, quantize: registry.Quantizer, x: Tensor) -> dict[str, Any]:
    """What a quantiser computes: {"rounding": .., "codes_off": ..}; somebody's own may be any rounding of the contract.

    Raises ValueError where it is none of those that it may be.
    """
    foreign = registry.is_foreign(name)
    known = [r for r in Rounding if r is not Rounding.STOCHASTIC] if foreign else [numerics.parse_rounding(name)]
    wrong = []
    for rounding in known:
        what, count = difference(quantize, x, rounding)
        # Ours: `fixed` divides correctly and is equal bit for bit; `shipped` may differ as rarely as the contract says.
        most = x.numel() if foreign else FEW_CODES * x.numel() * (rounding is Rounding.SHIPPED)
        if not what and count <= most:
            return {"rounding": str(rounding), "codes_off": count}
        wrong.append(f"{rounding}: {what or _differ(count, x)}")
    raise ValueError(
        f"refusing to report times: {name} differs from the contract on {str(x.dtype).removeprefix('torch.')} "
        f"{list(x.shape)} ({'; '.join(wrong)})"
    )


def bench_quantizers(
    device: str,
    rows: Sequence[int] = (),
    features: int = FEATURES,
    rounds: int = ROUNDS,
    theirs: str = "",
    quantizers: Mapping[str, registry.Quantizer] | None = None,
) -> dict[str, Any]:
    """Times of `shipped` and `fixed`, and of somebody's own quantiser beside them, over (rows, features) in each dtype.

    Args:
        device: a CUDA device, or cpu: there the PyTorch reference is timed, not the kernels.
        rows: sizes; none: Matrix-Game-3.0's on a GPU, CPU_ROWS on a CPU.
        features: K.
        rounds: how often each is timed; at least 3.
        theirs: FILE:FUNCTION, see `kernels.registry`; '' for none.
        quantizers: what to time instead of the registry's, by name.

    Returns:
        What was timed, GB/s of the device's copy, and a dict a shape: `shapes` of the record.

    Raises:
        ValueError: sizes or rounds too small; a quantiser differs from the contract.
    """
    if rounds < 3:
        raise ValueError(f"an interval needs at least 3 rounds, got {rounds}")
    cuda = torch.device(device).type == "cuda"
    sizes = list(rows) or list(SITES if cuda else CPU_ROWS)
    if min(*sizes, features) < 1:
        raise ValueError(f"rows and features must be at least 1, got rows {sizes} and features {features}")
    if quantizers is None:
        specs = ["shipped", "fixed", *([theirs] if theirs else [])]
        quantizers = {_label(spec): registry.quantizer(spec, device) for spec in specs}
    copy = copy_gb_per_s(device)
    shapes = [_shape(quantizers, m, features, dtype, device, rounds, copy) for m in sizes for dtype in DTYPES]
    return {
        "what": "Triton kernels" if cuda and registry.TRITON else "PyTorch reference, not the Triton kernels",
        "copy_gb_per_s": copy,
        "rounds": rounds,
        "shapes": shapes,
    }


def _label(spec: str) -> str:
    """A quantiser's name in the record: FILE:FUNCTION without folders."""
    return spec.replace("\\", "/").rpartition("/")[2]


def _shape(
    quantizers: Mapping[str, registry.Quantizer],
    rows: int,
    features: int,
    dtype: str,
    device: str,
    rounds: int,
    copy: float,
) -> dict[str, Any]:
    """Check, then time, one shape in one dtype."""
    moved = rows * features * (DTYPES[dtype].itemsize + 1) + 4 * rows  # x read, codes and scales written
    count = sets_needed(moved, device)
    inputs = [random_rows(rows, features, DTYPES[dtype], device, seed) for seed in range(count)]
    checked = {name: check(name, quantize, inputs[0]) for name, quantize in quantizers.items()}
    calls = dict(quantizers) | {AGAIN: quantizers["shipped"]}
    seconds = time_in_turn(calls, inputs, device, rounds)
    ratios = {name: ratio_of(values, seconds["shipped"]) for name, values in seconds.items() if name != "shipped"}
    product = _product_seconds(quantizers["shipped"], inputs, device)
    layer = float(np.median(seconds["shipped"])) + product
    speed = {name: moved / float(np.median(values)) / 1e9 for name, values in seconds.items()}
    return {
        "rows": rows,
        "features": features,
        "dtype": dtype,
        "sites": SITES.get(rows, "") if features == FEATURES else "",
        "inputs": count,
        "bytes_moved": moved,
        "checked": checked,
        "times": {name: asdict(timing(values)) for name, values in seconds.items()},
        "gb_per_s": speed,
        "of_copy": {name: value / copy for name, value in speed.items()},
        "ratio_to_shipped": {name: asdict(ratio) for name, ratio in ratios.items()},
        "int8_linear_s": product,
        "layer_to_shipped": {
            name: (float(np.median(values)) + product) / layer for name, values in seconds.items() if name != "shipped"
        },
    }


def _product_seconds(quantize: registry.Quantizer, inputs: Sequence[Tensor], device: str) -> float:
    """Seconds of the int8 product that follows the quantiser in a square layer [features, features]."""
    features = inputs[0].shape[1]
    weight = numerics.quantize_weight(random_rows(features, features, torch.bfloat16, device, SEED))
    int8_linear: Callable[..., Tensor] = numerics.int8_linear
    if torch.device(device).type == "cuda" and registry.TRITON:
        from analysis.kernels import gemm

        int8_linear = gemm.int8_linear
    coded = [quantize(x) for x in inputs]

    def product(pair: tuple[Tensor, Tensor]) -> Tensor:
        return int8_linear(*pair, *weight, None)

    return float(np.median(time_in_turn({"": product}, coded, device, PRODUCT_ROUNDS)[""]))
