"""The child process that runs a target, seen from outside: start, ask, end. Imports nothing heavy, so that it can be
started before this process has imported torch, and both import at the same time; or, quicker, as a fork of this one
that has.

    process = Process("kernels.py:quantize", adapter=None, device="auto")
    reply = process.read(limit_s=180)          # {"loaded": true, ...}, or None: it is gone, or late
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

from analysis.audit.forked import ForkedChild

STDERR_TAIL = 2000
EXIT_LIMIT_S = 10.0
START_LIMIT_S = 180.0  # importing torch, triton and the target's own package


class Process:
    """A running `analysis.audit.worker`. Its replies come through a pipe of their own; it may print as it likes."""

    def __init__(self, target: str, adapter: str | None, device: str, fork: bool = False) -> None:
        """fork: start from this process as it is instead of a new interpreter; see `forked` for when that is sound."""
        self.target, self.adapter, self.device, self.fork = target, adapter, device, fork
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        read_fd, write_fd = os.pipe()
        self._popen = self._forked(write_fd) if fork else self._spawned(write_fd)
        os.close(write_fd)
        self._replies = os.fdopen(read_fd, "rb", buffering=0)
        self._pending = b""
        self._gone = False

    def _spawned(self, write_fd: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "analysis.audit.worker",
                str(write_fd),
                self.target,
                self.adapter or "",
                self.device,
            ],
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=self._output,
            pass_fds=(write_fd,),
            env=_environment(),
            start_new_session=True,
        )

    def _forked(self, write_fd: int) -> ForkedChild:
        def main() -> None:
            os.environ.pop("TRITON_INTERPRET", None)
            os.environ.update(_environment())
            from analysis.audit.worker import serve

            serve(write_fd, self.target, self.adapter, self.device)

        return ForkedChild(main, self._output.fileno(), write_fd)

    def ask(self, request: dict[str, Any], limit_s: float) -> dict[str, Any] | None:
        """Send a request and wait for its reply; None when the process is gone or late."""
        assert self._popen.stdin is not None
        try:
            self._popen.stdin.write(json.dumps(request).encode() + b"\n")
            self._popen.stdin.flush()
        except BrokenPipeError:
            self._gone = True
            return None
        return self.read(limit_s)

    def read(self, limit_s: float) -> dict[str, Any] | None:
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._pending:
            ready, _, _ = select.select([self._replies], [], [], max(0.0, deadline - time.monotonic()))
            chunk = self._replies.read(65536) if ready else b""
            if not chunk:
                self._gone = bool(ready)
                return None
            self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        return json.loads(line)

    def end(self) -> str | None:
        """End the process and what it started (its group, nothing else). How it ended, or None if it was alive."""
        if self._output.closed:
            return None
        code = self._popen.poll()
        if code is None and self._gone:  # it closed its end of the pipe, and will be a zombie in a moment
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._popen.wait(timeout=EXIT_LIMIT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()
        with contextlib.suppress(BrokenPipeError):
            assert self._popen.stdin is not None
            self._popen.stdin.close()
        self._replies.close()
        self._output.seek(0)
        tail = self._output.read()[-STDERR_TAIL:].decode(errors="replace").strip()
        self._output.close()
        if code is None:
            return None
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"process exited with status {code}"
        return f"{tail}\n{how}".strip()


def _environment() -> dict[str, str]:
    """The child's: the path of this process; whether Triton interprets is for the child to say."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return kept | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
