"""The child process that runs a target: `python -m analysis.audit.worker FD TARGET ADAPTER DEVICE`.

Requests come as JSON lines on stdin and name a file with the input; replies go as JSON lines to the file descriptor FD,
so a target may print as it likes. Whatever it does to the process (hang, exit, segfault) ends this process only.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from analysis.audit import interpreter
from analysis.audit.call import Call, Outcome, perform
from analysis.audit.load import load_target, short_traceback

INTERPRETER = "CPU, Triton interpreter"


def serve(reply_fd: int, target: str, adapter: str | None, device: str) -> None:
    """Load the target, report how that went, then answer calls until stdin closes."""
    requests = sys.stdin
    sys.stdin = Path(os.devnull).open()  # noqa: SIM115 - lives as long as the process
    with os.fdopen(reply_fd, "w") as replies, ExitStack() as stack:

        def reply(message: dict[str, Any]) -> None:
            replies.write(json.dumps(message) + "\n")
            replies.flush()

        torch.set_num_threads(1)
        has_cuda = torch.cuda.is_available()
        if device == "auto":
            device = "cuda" if has_cuda else "cpu"
        if device == "cuda" and not has_cuda:
            reply({"loaded": False, "why": "was to run on cuda", "detail": "torch sees no CUDA device here"})
            return
        if device == "cpu":
            os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
            stack.enter_context(interpreter.repaired())
        try:
            function = load_target(target, adapter)
        except BaseException as error:  # an import may raise anything, SystemExit included
            reply({"loaded": False, "why": "does not import:", "detail": short_traceback(error)})
            return
        reply({"loaded": True, "device": device, "versions": versions(device, interpreter.launches() > 0)})
        for line in requests:
            request = json.loads(line)
            call = Call(x=torch.load(request["input"], weights_only=True), **request["call"])
            reply(
                _stored(perform(function, call, device), request["output"])
                | {"versions": versions(device, interpreter.launches() > 0)}
            )


def _stored(outcome: Outcome, path: str) -> dict[str, Any]:
    tensors = {name: value for name in ("codes", "scales") if (value := getattr(outcome, name)) is not None}
    torch.save(tensors, path)
    return {"kind": outcome.kind, "detail": outcome.detail, "input_changed": outcome.input_changed}


def versions(device: str, interpreted: bool) -> dict[str, str]:
    """What the target ran on."""
    found = {"python": sys.version.split()[0], "torch": torch.__version__}
    triton = sys.modules.get("triton")
    if triton is not None:
        found["triton"] = triton.__version__
    found["hardware"] = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    if interpreted:
        found["hardware"] = INTERPRETER
    return found


def encode(call: Call) -> dict[str, Any]:
    """The JSON part of a call: everything but its input."""
    return {name: value for name, value in vars(call).items() if name != "x"}


if __name__ == "__main__":
    _fd, _target, _adapter, _device = sys.argv[1:]
    serve(int(_fd), _target, _adapter or None, _device)
