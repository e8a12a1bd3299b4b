"""A child process that starts with the modules of this one: torch is imported once for both, which is most of an audit.

    child = ForkedChild(lambda: serve(...), stdout_fd=3)     # what of subprocess.Popen the audit needs: pid, stdin, ...

Only from a process that has run next to nothing: no CUDA, no threads of PyTorch, no module that the target must import
afresh. The command line's is one; elsewhere a new interpreter is started instead.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

POLL_S = 0.005


def can_fork() -> bool:
    """Whether this process may fork once it has torch: nothing used torch yet, and the libraries survive it here."""
    return sys.platform == "linux" and "torch" not in sys.modules


class ForkedChild:
    """Runs `main` in a fork, in a process group of its own, with standard input a pipe and all output in a file."""

    def __init__(self, main: Callable[[], None], output_fd: int, keep_fd: int) -> None:
        """keep_fd: the one descriptor besides the standard ones that main uses."""
        theirs, ours = os.pipe()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _become_child(main, theirs, output_fd, keep_fd)
        os.close(theirs)
        with contextlib.suppress(OSError):  # whichever of the two is first
            os.setpgid(self.pid, self.pid)
        self.stdin = os.fdopen(ours, "wb")

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """As subprocess.Popen.wait."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if timeout is not None and deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("the audit's child", timeout)
            time.sleep(POLL_S)
        return code


def _become_child(main: Callable[[], None], stdin_fd: int, output_fd: int, keep_fd: int) -> NoReturn:
    code = 1
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        for fd, standard in ((stdin_fd, 0), (output_fd, 1), (output_fd, 2)):
            os.dup2(fd, standard)
        kept = os.dup(keep_fd) if keep_fd <= 2 else keep_fd
        os.closerange(3, kept)  # the other ends of the pipes above all: their reader must see them end
        os.closerange(kept + 1, max(os.sysconf("SC_OPEN_MAX"), 4096))
        # New objects: the old ones may hold text or a lock of the parent's.
        sys.stdin, sys.stdout, sys.stderr = (
            open(0, closefd=False),  # noqa: SIM115
            open(1, "w", closefd=False),  # noqa: SIM115
            open(2, "w", buffering=1, closefd=False),  # noqa: SIM115
        )
        main()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
