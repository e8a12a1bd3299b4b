"""What the Triton interpreter leaves undefined or gets wrong, and an audit must pin down.

Only touched in a child process that runs a target on the CPU.

- A masked load without `other` gives 0 in the masked lanes; on a GPU they are undefined. `undefined_lanes` fills them.
- A cast from fp32 to bf16 truncates, where a GPU rounds to nearest even, and one from bf16 to fp32 drops the low bits
  of denormals. `repaired` mends both, for otherwise a kernel with a bf16 quotient or scale would be judged by
  the interpreter's rounding instead of its own.
- An autotuned kernel asks for a GPU to be timed on; `repaired` lets it run with its first configuration.
- libdevice functions fail; `repaired` gives those that round (round, rint, floor, ...) their meaning.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

_launches = 0


def active() -> bool:
    """Whether kernels defined from now on run in the interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def launches() -> int:
    """How many kernels have run in the interpreter within `repaired`, in this process."""
    return _launches


@contextmanager
def undefined_lanes(value: float) -> Iterator[None]:
    """Within, floating lanes that a masked load without `other` leaves undefined hold `value`."""
    if not active():
        yield
        return
    from triton import language as tl
    from triton.runtime import interpreter as ti

    original = ti.InterpreterBuilder.create_masked_load

    def load(self: Any, ptrs: Any, mask: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
        element = ptrs.get_element_ty()
        if other is None and element.is_floating():
            data = np.full(ptrs.data.shape, value, dtype=np.float32)
            if element == tl.bfloat16:
                data = _to_bf16_bits(data)
            else:
                with np.errstate(over="ignore"):
                    data = data.astype(ti._get_np_dtype(element))
            other = ti.TensorHandle(data, element)
        return original(self, ptrs, mask, other, *args, **kwargs)

    ti.InterpreterBuilder.create_masked_load = load
    try:
        yield
    finally:
        ti.InterpreterBuilder.create_masked_load = original


@contextmanager
def repaired() -> Iterator[None]:
    """Within, what the module names is mended, and launches are counted. Does nothing where triton is not installed."""
    try:
        from triton.language.extra import libdevice
        from triton.language.extra.cuda import libdevice as cuda_libdevice
        from triton.runtime import autotuner
        from triton.runtime import interpreter as ti
    except ImportError:
        yield
        return
    launch, prune = ti.GridExecutor.__call__, autotuner.Autotuner.prune_configs

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _launches
        _launches += 1
        return launch(self, *args, **kwargs)

    patches: list[tuple[Any, str, Any]] = [
        (ti, "_convert_float", _bf16_aware(ti._convert_float)),
        (ti.GridExecutor, "__call__", counted),
        (autotuner.Autotuner, "prune_configs", lambda self, kwargs: list(prune(self, kwargs))[:1]),
    ]
    for module in (libdevice, cuda_libdevice):
        patches += [(module, name, _elementwise(function)) for name, function in _LIBDEVICE.items()]
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
    try:
        for owner, name, value in patches:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in kept:
            setattr(owner, name, value)


def _bf16_aware(convert_float: Callable[..., Any]) -> Callable[..., Any]:
    from triton import language as tl

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source == tl.float32 and target == tl.bfloat16:
            return _to_bf16_bits(np.ascontiguousarray(data, dtype=np.float32))
        if source == tl.bfloat16 and target == tl.float32:
            return data.astype(np.uint32) << 16
        return convert_float(data, source, target, rounding)

    return convert


def _half_away(v: np.ndarray) -> np.ndarray:
    t = np.trunc(v)
    return t + np.trunc(2 * (v - t))


_LIBDEVICE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "round": _half_away,
    "rint": np.rint,
    "nearbyint": np.rint,
    "llrint": lambda v: np.rint(v).astype(np.int64),
    "llround": lambda v: _half_away(v).astype(np.int64),
    "floor": np.floor,
    "ceil": np.ceil,
    "trunc": np.trunc,
}


def _elementwise(function: Callable[[np.ndarray], np.ndarray]) -> Callable[..., Any]:
    """`function` as a Triton function of one fp32 or fp64 tensor, for interpreted kernels."""
    from triton import language as tl
    from triton.runtime import interpreter as ti

    def apply(x: Any, **_: Any) -> Any:
        result = function(x.handle.data)
        element = tl.int64 if result.dtype == np.int64 else x.dtype
        kind = tl.block_type(element, x.type.shape) if x.type.is_block() else element
        return tl.tensor(ti.TensorHandle(result, element), kind)

    return apply


def _to_bf16_bits(data: np.ndarray) -> np.ndarray:
    """uint16 bits of fp32 values rounded to the nearest bf16, ties to even; NaN stays NaN."""
    bits = data.view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(data), np.uint16(0x7FC0), rounded).astype(np.uint16)
