"""One call of a target: lay the input out as asked, poison what the target must not rely on, collect what it returns.

Poison is of three kinds: memory around the input (`guarded`, `row_padded` views), the memory of fresh output tensors
(`fill`: two different fills show every element that was never written), and in the Triton interpreter the lanes of a
masked load that has no `other` (`lanes`). Inputs are compared bit for bit after the call.

    outcome = perform(fn, Call(x, view="transposed"), device="cpu")
    outcome.kind            # "ok", "raised", "malformed"; a child process adds "crashed" and "hung"
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from analysis.audit import interpreter
from analysis.audit.grid import grid_of
from analysis.audit.load import short_traceback

VIEWS = ("plain", "guarded", "row_padded", "col_strided", "transposed")
FILLS = ((-77, 12345.0, 3.0), (99, -54321.0, -5.0))  # int8, float, fp8
GUARD = 256  # elements on either side: whole cache lines, so that alignment stays what it was
_FACTORIES = ("empty", "empty_like", "empty_strided")


@dataclass(frozen=True)
class Call:
    """What to run: x [M, K] contiguous on the CPU, how to lay it out, and the poisons (None: leave alone)."""

    x: Tensor
    view: str = "plain"
    guard: float = 0.0
    fill: int | None = None
    lanes: float | None = None


@dataclass(frozen=True)
class Outcome:
    """What came of a call: `codes` [M, K] and `scales` (any shape, or None) on the CPU; `detail` explains a failure."""

    kind: str
    codes: Tensor | None = None
    scales: Tensor | None = None
    detail: str = ""
    input_changed: bool = False

    @property
    def ok(self) -> bool:
        return self.kind == "ok"

    @property
    def error(self) -> str:
        """The failure in one line."""
        return f"{self.kind}: {self.detail.strip().splitlines()[-1] if self.detail.strip() else 'no message'}"


def perform(fn: Callable[[Tensor], Any], call: Call, device: str) -> Outcome:
    """Run `fn` on the input that `call` describes. Never raises for what the target does."""
    buffer, x = lay_out(call, device)
    before = buffer.clone()
    try:
        with ExitStack() as stack:
            if call.fill is not None:
                stack.enter_context(poisoned_outputs(*FILLS[call.fill]))
            if call.lanes is not None:
                stack.enter_context(interpreter.undefined_lanes(call.lanes))
            stack.enter_context(torch.no_grad())
            result = fn(x)
            if device == "cuda":
                torch.cuda.synchronize()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a target may raise anything, SystemExit included
        fatal = device == "cuda" and any(word in str(error) for word in ("CUDA error", "device-side", "illegal memory"))
        return Outcome("crashed" if fatal else "raised", detail=short_traceback(error))
    try:
        codes, scales = extract(result, call.x.shape)
    except ValueError as error:
        return Outcome("malformed", detail=str(error))
    return Outcome("ok", codes, scales, input_changed=not _same_bits(before, buffer))


def lay_out(call: Call, device: str) -> tuple[Tensor, Tensor]:
    """(buffer, view of it that equals call.x) on the device; what the view does not cover holds `guard`."""
    m, k = call.x.shape
    poison = torch.full((m * k * 2 + 2 * GUARD + m * 64,), call.guard, dtype=call.x.dtype, device=device)
    match call.view:
        case "plain":
            buffer = torch.zeros(m, k, dtype=call.x.dtype, device=device)
            view = buffer
        case "guarded":
            buffer = poison[: m * k + 2 * GUARD]
            view = buffer[GUARD : GUARD + m * k].view(m, k)
        case "row_padded":
            buffer = poison[: m * (k + 64)].view(m, k + 64)
            view = buffer[:, :k]
        case "col_strided":
            buffer = poison[: m * k * 2].view(m, k * 2)
            view = buffer[:, ::2]
        case "transposed":
            buffer = poison[: m * k].view(k, m)
            view = buffer.t()
        case _:
            raise ValueError(f"unknown view {call.view!r}; known: {', '.join(VIEWS)}")
    view.copy_(call.x)
    return buffer, view


@contextmanager
def poisoned_outputs(int8: int, floating: float, fp8: float) -> Iterator[None]:
    """Within, memory from torch.empty and its relatives starts out filled; C++ allocations are out of reach."""

    def filled(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def wrapper(*args: Any, **kwargs: Any) -> Tensor:
            tensor = make(*args, **kwargs)
            with torch.no_grad():
                if grid_of(tensor.dtype) is not None and tensor.is_floating_point():
                    tensor.copy_(torch.full((), fp8, device=tensor.device).expand(tensor.shape))
                elif tensor.is_floating_point():
                    tensor.fill_(floating)
                elif tensor.dtype == torch.int8:
                    tensor.fill_(int8)
            return tensor

        return wrapper

    kept = {name: getattr(torch, name) for name in _FACTORIES}
    new_empty = torch.Tensor.new_empty
    try:
        for name, make in kept.items():
            setattr(torch, name, filled(make))
        torch.Tensor.new_empty = filled(new_empty)  # type: ignore[method-assign]
        yield
    finally:
        for name, make in kept.items():
            setattr(torch, name, make)
        torch.Tensor.new_empty = new_empty  # type: ignore[method-assign]


def extract(result: Any, shape: torch.Size) -> tuple[Tensor, Tensor | None]:
    """The codes and scales in whatever a target returned. ValueError says what was there instead."""
    leaves = list(_leaves(result))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    codes = [t for t in tensors if grid_of(t.dtype) is not None]
    if len(codes) != 1:
        raise ValueError(f"expected one int8 or float8_e4m3fn tensor of codes, got {_described(tensors, result)}")
    others = [t for t in tensors if t is not codes[0] and t.is_floating_point()]
    others += [torch.tensor(leaf, dtype=torch.float64) for leaf in leaves if isinstance(leaf, float)]
    if len(others) > 1:
        raise ValueError(f"expected one floating tensor of scales beside the codes, got {_described(tensors, result)}")
    squeezed = [n for n in codes[0].shape if n != 1]
    if codes[0].shape != shape and squeezed != [n for n in shape if n != 1]:
        raise ValueError(f"codes have shape {list(codes[0].shape)}, the input {list(shape)}; use --adapter")
    scales = others[0].detach().cpu().clone() if others else None
    return codes[0].detach().cpu().reshape(shape).clone(), scales


def _described(tensors: list[Tensor], result: Any) -> str:
    shapes = [f"{t.dtype} {list(t.shape)}".removeprefix("torch.") for t in tensors]
    return f"{', '.join(shapes) or type(result).__name__}; use --adapter"


def _leaves(result: Any) -> Iterator[Any]:
    if isinstance(result, dict):
        result = tuple(result.values())
    elif dataclasses.is_dataclass(result) and not isinstance(result, type):
        result = tuple(vars(result).values())
    if isinstance(result, tuple | list):
        for item in result:
            yield from _leaves(item)
    else:
        yield result


def _same_bits(a: Tensor, b: Tensor) -> bool:
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.view(integer), b.view(integer))
