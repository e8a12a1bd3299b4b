"""Timing of row quantisers: order, ratio, and the refusal to report on wrong codes."""

import contextlib
from functools import partial

import numpy as np
import pytest
import torch

from analysis import numerics
from analysis.measure import kernel_bench
from analysis.numerics import Rounding

SIZE = {"rows": (16,), "features": 64, "rounds": 6}


def reference(rounding):
    return partial(numerics.quantize_rows, rounding=rounding)


def pair(**changes):
    return {"shipped": reference(Rounding.SHIPPED), "fixed": reference(Rounding.FIXED)} | changes


def test_every_function_takes_every_place_equally_often():
    for count in (1, 2, 3, 4):
        names = list("abcd"[:count])
        orders = [kernel_bench._order(names, number) for number in range(2 * count)]
        for place in range(count):
            assert sorted(order[place] for order in orders) == sorted(2 * names)


def test_seconds_a_call_are_the_mean_over_inputs(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(kernel_bench.time, "perf_counter", lambda: float(next(clock)))
    seen = []
    seconds = kernel_bench.time_in_turn({"a": seen.append, "b": seen.append}, [1, 2, 3, 4], "cpu", 3)
    assert seconds == {"a": [0.25] * 3, "b": [0.25] * 3}
    assert seen.count(4) == 6 and seen.count(1) == 6 + 2  # a warm-up on the first two


def test_ratio_is_paired_by_round():
    base = np.linspace(1, 3, 40)  # a clock that drifts threefold
    ratio = kernel_bench.ratio_of(1.1 * base, base)
    assert ratio.low == pytest.approx(1.1) and ratio.high == pytest.approx(1.1)
    noisy = kernel_bench.ratio_of(base * (1 + 0.1 * np.sin(np.arange(40))), base)
    assert noisy.low < noisy.median < noisy.high and noisy.low < 1 < noisy.high
    assert noisy.quartile_low < noisy.low and noisy.high < noisy.quartile_high


def test_record():
    found = kernel_bench.bench_quantizers("cpu", **SIZE)
    assert found["what"].startswith("PyTorch reference") and found["copy_gb_per_s"] > 0
    assert [(s["rows"], s["features"], s["dtype"]) for s in found["shapes"]] == [
        (16, 64, "float32"),
        (16, 64, "bfloat16"),
    ]
    for shape, bytes_of_x in zip(found["shapes"], (4, 2), strict=True):
        assert shape["bytes_moved"] == 16 * 64 * (bytes_of_x + 1) + 4 * 16
        assert set(shape["times"]) == {"shipped", "fixed", kernel_bench.AGAIN}
        assert set(shape["ratio_to_shipped"]) == {"fixed", kernel_bench.AGAIN}
        median = shape["times"]["fixed"]["median_s"]
        assert shape["gb_per_s"]["fixed"] == pytest.approx(shape["bytes_moved"] / median / 1e9)
        assert shape["checked"]["fixed"] == {"rounding": "fixed", "codes_off": 0}


@pytest.mark.parametrize(("name", "wrong"), [("fixed", "shipped"), ("shipped", "fixed"), ("fixed", "floor")])
def test_a_wrong_kernel_is_refused(name, wrong):
    quantizers = pair(**{name: reference(Rounding(wrong))})
    with pytest.raises(ValueError, match=rf"refusing to report times: {name} differs .*codes \(\d+ of 1024 differ\)"):
        kernel_bench.bench_quantizers("cpu", **SIZE, quantizers=quantizers)


def test_wrong_scales_are_refused():
    def scaled_up(x):
        codes, scales = numerics.quantize_rows(x, Rounding.FIXED)
        return codes, scales * 1.001

    with pytest.raises(ValueError, match="fixed: scales"):
        kernel_bench.bench_quantizers("cpu", **SIZE, quantizers=pair(fixed=scaled_up))


def test_only_a_code_beside_a_boundary_may_differ_and_fixed_none():
    x = torch.zeros(100, 200)
    x[:, 0] = 127  # inv is 1
    x[0, 1:3] = torch.tensor([4.99995, 4.5])
    beside = pair(shipped=off_by_one(Rounding.SHIPPED, 1))
    assert kernel_bench.check("shipped", beside["shipped"], x) == {"rounding": "shipped", "codes_off": 1}
    with pytest.raises(ValueError, match="shipped differs"):
        kernel_bench.check("shipped", off_by_one(Rounding.SHIPPED, 2), x)
    with pytest.raises(ValueError, match="fixed differs"):
        kernel_bench.check("fixed", off_by_one(Rounding.FIXED, 2), x)


def off_by_one(rounding, column):
    def quantize(x):
        codes, scales = numerics.quantize_rows(x, rounding)
        codes[0, column] += 1
        return codes, scales

    return quantize


@pytest.mark.parametrize("body", ["round", "trunc"])
def test_somebodys_own_is_timed_as_what_it_computes(tmp_path, body):
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n\n\ndef quantize(x):\n    x = x.float()\n    inv = 127 / x.abs().amax(1, keepdim=True)\n"
        f"    return torch.{body}(x * inv).to(torch.int8), 1 / inv\n"
    )
    found = kernel_bench.bench_quantizers("cpu", **SIZE, theirs=f"{file}:quantize")
    for shape in found["shapes"]:
        assert shape["checked"]["mine.py:quantize"]["rounding"] == {"round": "fixed", "trunc": "shipped"}[body]
        assert "mine.py:quantize" in shape["ratio_to_shipped"]
    assert str(tmp_path) not in str(found)


def test_somebodys_own_that_is_no_rounding_is_refused(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch\n\n\ndef quantize(x):\n    scale = x.float().abs().amax(1) / 120\n"
        "    return torch.round(x / scale[:, None]).to(torch.int8), scale\n"
    )
    with pytest.raises(ValueError, match=r"refusing to report times: mine.py:quantize differs .*half_even: scales"):
        kernel_bench.bench_quantizers("cpu", **SIZE, theirs=f"{tmp_path / 'mine.py'}:quantize")


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"rounds": 2}, "at least 3 rounds, got 2"), ({"rows": (0,)}, "at least 1"), ({"features": 0}, "at least 1")],
)
def test_sizes_are_checked(changes, said):
    with pytest.raises(ValueError, match=said):
        kernel_bench.bench_quantizers("cpu", **(SIZE | changes))


class Device:
    """A stand-in for torch.cuda: work that the host enqueues runs after a sleep; a launch costs the host time."""

    def __init__(self, launch_s, call_s):
        self.launch_s, self.call_s, self.host, self.free, self.sleeps = launch_s, call_s, 0.0, 0.0, []

    def _sleep(self, cycles):
        self.sleeps.append(cycles / kernel_bench.SLEEP_CYCLES_S)
        self.free = max(self.free, self.host) + self.sleeps[-1]

    def launch(self, _):
        self.host += self.launch_s
        self.free = max(self.free, self.host) + self.call_s

    def synchronize(self):
        self.host = self.free = max(self.host, self.free)

    def Event(self, enable_timing):
        device = self

        class Event:
            def record(self):
                self.at = max(device.host, device.free)

            def query(self):
                return self.at <= device.host

            def elapsed_time(self, other):
                return 1000 * (other.at - self.at)

        return Event()


@pytest.mark.parametrize(("launch_s", "grows"), [(1e-6, False), (1e-3, True)])
def test_launches_cost_nothing_behind_a_sleep(monkeypatch, launch_s, grows):
    device = Device(launch_s, call_s=2e-6)
    for name in ("_sleep", "synchronize", "Event"):
        monkeypatch.setattr(kernel_bench.torch.cuda, name, getattr(device, name))
    monkeypatch.setattr(kernel_bench.torch.cuda, "device", lambda _: contextlib.nullcontext())
    seconds = kernel_bench.time_in_turn({"a": device.launch, "b": device.launch}, [1, 2, 3, 4], "cuda", 3)
    assert np.allclose([*seconds["a"], *seconds["b"]], 2e-6, rtol=1e-6)
    assert (max(device.sleeps) > device.sleeps[0]) == grows
