"""A fork behaves as a new interpreter would: its own ends, output and group. Forked from a fresh process each time."""

from __future__ import annotations

import subprocess
import sys

import pytest

PARENT = """
import os, signal, sys, tempfile
from analysis.audit.forked import ForkedChild, can_fork
assert can_fork()
output = tempfile.TemporaryFile()
kept, theirs = os.pipe()
def main():
    {main}
child = ForkedChild(main, output.fileno(), theirs)
os.close(theirs)
assert os.getpgid(child.pid) == child.pid
child.stdin.close()
code = child.wait(timeout=20)
assert child.poll() == code
output.seek(0)
print(code, os.read(kept, 99), output.read().decode().strip().splitlines()[-1:])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a new interpreter is started")
@pytest.mark.parametrize(
    ("main", "told"),
    [
        ("print('noise')", "0 b'' ['noise']"),
        ("os.write(theirs, sys.stdin.read().encode() + b'end')", "0 b'end' []"),
        ("os.fsync(kept)", "1 b'' ['OSError: [Errno 9] Bad file descriptor']"),
        ("raise SystemExit(3)", "1 b'' ['SystemExit: 3']"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "-9 b'' []"),
    ],
    ids=["prints", "sees its input end", "holds no end of the parent's", "exits", "is killed"],
)
def test_a_fork(main, told):
    script = PARENT.format(main=main)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == told, done.stderr


def test_a_process_that_has_torch_does_not_fork():
    import torch  # noqa: F401

    from analysis.audit.forked import can_fork

    assert not can_fork()
