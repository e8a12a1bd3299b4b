"""The `shrinkage` command run in this process."""

import sys

import pytest

from analysis.cli import main


@pytest.fixture
def run(monkeypatch):
    """run("measure", ...) -> the exit code."""

    def shrinkage(*arguments):
        monkeypatch.setattr(sys, "argv", ["shrinkage", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        return stop.value.code or 0

    return shrinkage
