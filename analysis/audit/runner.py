"""Where calls run: in this process for a plain function, in a child process for a TARGET.

A child that crashes or exceeds the time limit of a call is ended, and started again for the next call, so that one bad
check costs one outcome and not the report. After `MAX_DEATHS` of them nothing more is run.

    with ChildRunner("kernels.py:quantize", device="cpu") as runner:
        outcome = runner.run(Call(x))
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from analysis.audit import interpreter
from analysis.audit.call import Call, Outcome, perform
from analysis.audit.process import START_LIMIT_S, Process
from analysis.audit.worker import INTERPRETER, encode, versions

MAX_DEATHS = 4


class CannotAudit(ValueError):
    """The target gives nothing to judge: it does not import, never returns codes, or returns what is not understood.

    `fatal`: it ended or hung its process on an ordinary input.
    """

    def __init__(self, message: str, fatal: bool = False) -> None:
        super().__init__(message)
        self.fatal = fatal


class Runner(Protocol):
    device: str
    target: str

    def run(self, call: Call) -> Outcome: ...

    def versions(self) -> dict[str, str]: ...

    def interpreted(self) -> bool:
        """Whether the target has launched kernels in the Triton interpreter."""
        ...


class LocalRunner:
    """Runs a function here: no isolation, no time limit, no start-up cost."""

    def __init__(self, function: Callable[[Tensor], Any], device: str) -> None:
        self.function, self.device = function, device
        self._launches = interpreter.launches()
        module, name = getattr(function, "__module__", "?"), getattr(function, "__qualname__", repr(function))
        self.target = f"{module}:{name}"

    def run(self, call: Call) -> Outcome:
        return perform(self.function, call, self.device)

    def versions(self) -> dict[str, str]:
        return versions(self.device, self.interpreted())

    def interpreted(self) -> bool:
        return interpreter.launches() > self._launches


class ChildRunner:
    """Runs a TARGET in a child process; a context manager. `device` is known once it is entered."""

    def __init__(self, process: Process, limit_s: float = 60.0) -> None:
        self.target, self.device, self.limit_s = process.target, process.device, limit_s
        self.deaths = 0
        self._process: Process | None = process
        self._versions: dict[str, str] = {}

    def __enter__(self) -> Self:
        assert self._process is not None
        self._adapter, self._fork = self._process.adapter, self._process.fork
        self._folder = tempfile.TemporaryDirectory(prefix="shrinkage-audit-")
        try:
            self._load()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.end()
        self._folder.cleanup()

    def versions(self) -> dict[str, str]:
        return self._versions

    def interpreted(self) -> bool:
        return self._versions["hardware"] == INTERPRETER

    def run(self, call: Call) -> Outcome:
        if self.deaths >= MAX_DEATHS:
            return Outcome("not run", detail=f"the target had already ended or hung its process {MAX_DEATHS} times")
        try:
            if self._process is None:
                self._process = Process(self.target, self._adapter, self.device, self._fork)
                self._load()
        except CannotAudit as error:
            return Outcome("crashed", detail=str(error))
        files = {name: str(Path(self._folder.name) / f"{name}.pt") for name in ("input", "output")}
        torch.save(call.x, files["input"])
        message = self._process.ask({**files, "call": encode(call)}, self.limit_s)
        if message is None:
            return self._died(self.limit_s)
        self._versions = message.pop("versions")
        tensors = torch.load(files["output"], weights_only=True)
        if message["kind"] == "crashed":  # a CUDA error that leaves the process unusable
            self._died(self.limit_s)
        return Outcome(codes=tensors.get("codes"), scales=tensors.get("scales"), **message)

    def _load(self) -> None:
        """Wait until the child has imported the target."""
        assert self._process is not None
        loaded = self._process.read(START_LIMIT_S)
        if loaded is None:
            outcome = self._died(START_LIMIT_S)
            raise CannotAudit(f"{self.target} does not import: {outcome.kind}\n{outcome.detail}")
        if not loaded["loaded"]:
            self._process.end()
            self._process = None
            raise CannotAudit(f"{self.target} {loaded['why']}\n{loaded['detail']}".rstrip())
        self._versions, self.device = loaded["versions"], loaded["device"]

    def _died(self, limit_s: float) -> Outcome:
        assert self._process is not None
        self.deaths += 1
        how = self._process.end()
        self._process = None
        if how is None:
            return Outcome("hung", detail=f"no answer within {limit_s:g} s")
        return Outcome("crashed", detail=how)
