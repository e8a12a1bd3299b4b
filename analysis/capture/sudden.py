"""Save before a process ends without unwinding: `os._exit` and SIGTERM. Imports no torch."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from analysis.capture.launch import Ending

TERMINATED = 128 + signal.SIGTERM


class kept_on_sudden_end:
    """While the script runs, `os._exit` and SIGTERM first call `save`; forked children and own handlers stay as is."""

    def __init__(self, save: Callable[[Ending], None]) -> None:
        self.save, self.process, self.exit = save, os.getpid(), os._exit

    def __enter__(self) -> None:
        def exit_now(status: int) -> Any:
            if os.getpid() == self.process:
                self.save(Ending(status, f"os._exit({status})" if status else ""))
            self.exit(status)

        os._exit = exit_now
        self.handles_term = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if self.handles_term:
            try:
                signal.signal(signal.SIGTERM, self._terminated)
            except ValueError:  # not the main thread
                self.handles_term = False

    def _terminated(self, number: int, frame: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if os.getpid() == self.process:
            self.save(Ending(TERMINATED, "SIGTERM"))
        os.kill(os.getpid(), signal.SIGTERM)

    def __exit__(self, *_: Any) -> None:
        os._exit = self.exit
        if self.handles_term and signal.getsignal(signal.SIGTERM) == self._terminated:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
