"""Name -> row quantiser, one signature: x floating [M, K] -> (codes int8 [M, K], scales fp32 [M]).

A name is a rounding (`shipped`, `fixed`, `half_even`, ...), or points at anybody's kernel: `path/file.py:function` or
`package.module:function`. Roundings run as Triton kernels on a GPU where there is one, and as the reference elsewhere.

    quantize = quantizer("fixed", "cuda")
    theirs = quantizer("their_kernels.py:int8_quantize", "cuda")       # codes [M, K], scales [M] or [M, 1]

Importing this module needs no Triton.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from analysis import numerics
from analysis.numerics import Rounding

Quantizer = Callable[[Tensor], tuple[Tensor, Tensor]]

TRITON = importlib.util.find_spec("triton") is not None
ENGINES = ("auto", "triton", "reference")
WITH_KERNEL = (Rounding.SHIPPED, Rounding.FIXED)
STOCHASTIC_SEED = 0


def quantizer(name_or_spec: str, device: torch.device | str, engine: str = "auto") -> Quantizer:
    """The row quantiser called `name_or_spec`, for tensors on `device`.

    Args:
        name_or_spec: a rounding's name, FILE:FUNCTION or package.module:function.
        device: where x will live.
        engine: auto (Triton on CUDA, else the reference), triton or reference. A foreign function is taken as it is.

    Returns:
        A function of x [M, K]. That of `stochastic` draws from its own generator, seeded at creation. A foreign
        function's result is checked at every call, its scales come back as fp32 [M].

    Raises:
        ValueError: unknown name or engine; Triton asked for where it cannot run; the file, module or function is
            missing or not callable; at call time, a result that is not (int8 codes, floating scales).
    """
    if engine not in ENGINES:
        raise ValueError(f"unknown engine {engine!r}; known: {', '.join(ENGINES)}")
    if is_foreign(name_or_spec):
        return partial(_call_foreign, name_or_spec, load_foreign(name_or_spec))
    rounding = numerics.parse_rounding(name_or_spec)
    device = torch.device(device)
    if engine == "triton":
        _require_triton(rounding, device)
    if engine == "triton" or (engine == "auto" and TRITON and device.type == "cuda" and rounding in WITH_KERNEL):
        from analysis.kernels import quantize

        return partial(quantize.quantize_rows, rounding=rounding)
    generator = None
    if rounding == Rounding.STOCHASTIC:
        generator = torch.Generator(device).manual_seed(STOCHASTIC_SEED)
    return partial(numerics.quantize_rows, rounding=rounding, generator=generator)


def source_sha256(name_or_spec: str) -> str:
    """SHA-256 of the source that defines a quantiser, for provenance.

    A foreign function: of its file. A rounding: of `numerics.py`, followed by the Triton twin's files if it has one;
    the two agree bit for bit, so the hash does not depend on which of them ran.
    """
    if is_foreign(name_or_spec):
        files = [_source_file(name_or_spec)]
    else:
        here = Path(__file__).parent
        files = [Path(numerics.__file__)]
        if numerics.parse_rounding(name_or_spec) in WITH_KERNEL:
            files += [here / "quantize.py", here / "rounding.py", here / "common.py"]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def is_foreign(name_or_spec: str) -> bool:
    """Whether this points at somebody's function: it holds a colon."""
    return ":" in name_or_spec


def load_foreign(spec: str) -> Callable[..., Any]:
    """Import FILE:FUNCTION or package.module:function and return the function. ValueError says what is wrong."""
    where, name = _split(spec)
    module = _import_file(Path(where)) if where.endswith(".py") else _import_module(where)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            known = [k for k, v in vars(module).items() if inspect.isfunction(v) and not k.startswith("_")]
            raise ValueError(f"{where} has no {name!r}; its functions: {', '.join(known) or 'none'}")
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"{spec} is not callable but {type(found).__name__}")
    return found


def _require_triton(rounding: Rounding, device: torch.device) -> None:
    if not TRITON:
        raise ValueError("engine 'triton': Triton is not installed; pip install triton, or use engine 'reference'")
    if rounding not in WITH_KERNEL:
        raise ValueError(f"engine 'triton': {str(rounding)!r} has no Triton kernel; use engine 'auto' or 'reference'")
    if device.type == "cuda":
        return
    from analysis.kernels.common import INTERPRETED

    if not INTERPRETED.value:
        raise ValueError(
            f"engine 'triton' on {device}: Triton needs a CUDA device, or TRITON_INTERPRET=1 in the environment "
            "before Python starts; else use engine 'reference'"
        )


def _call_foreign(spec: str, function: Callable[..., Any], x: Tensor) -> tuple[Tensor, Tensor]:
    numerics.check_rows(x)
    result = function(x)
    if not isinstance(result, (tuple, list)) or len(result) != 2 or not all(isinstance(r, Tensor) for r in result):
        raise ValueError(f"{spec} must return (codes, scales), got {_describe(result)}")
    codes, scales = result
    if codes.dtype != torch.int8 or codes.shape != x.shape:
        raise ValueError(f"{spec} must return codes as int8 {list(x.shape)}, got {_describe(codes)}")
    rows = x.shape[0]
    if not scales.is_floating_point() or scales.shape not in ((rows,), (rows, 1)):
        raise ValueError(f"{spec} must return floating scales as [{rows}] or [{rows}, 1], got {_describe(scales)}")
    return codes, scales.reshape(rows).float()


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__} of {', '.join(_describe(v) for v in value) or 'nothing'}"
    return type(value).__name__


def _split(spec: str) -> tuple[str, str]:
    where, _, name = spec.rpartition(":")
    if not where or not name.replace(".", "_").isidentifier():
        raise ValueError(f"cannot read {spec!r}: expected FILE.py:FUNCTION or package.module:function")
    return where, name


def _import_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise ValueError(
            f"cannot import {name!r}: {type(error).__name__}: {error}; a file is given as FILE.py:FUNCTION"
        ) from error  # fmt: skip


def _import_file(path: Path) -> ModuleType:
    """Import a file under a name made of its contents and place, so that no two files meet in sys.modules."""
    if not path.is_file():
        raise ValueError(f"no file {path}; expected FILE.py:FUNCTION or package.module:function")
    path = path.resolve()
    key = hashlib.sha256(str(path).encode() + path.read_bytes()).hexdigest()[:16]
    name = f"analysis_foreign_{path.stem}_{key}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and Triton look a function's module up by name
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ValueError(f"cannot import {path}: {type(error).__name__}: {error}") from error
    return module


def _source_file(spec: str) -> Path:
    where, _ = _split(spec)
    if where.endswith(".py"):
        if not Path(where).is_file():
            raise ValueError(f"no file {where}; expected FILE.py:FUNCTION or package.module:function")
        return Path(where)
    function = inspect.unwrap(load_foreign(spec))
    file = inspect.getsourcefile(function) if inspect.isfunction(function) else sys.modules[where].__file__
    if file is None:
        raise ValueError(f"{spec} has no source file; write it to a .py file so that the run can name what it measured")
    return Path(file)
