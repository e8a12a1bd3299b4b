"""Tables and reports need no torch: whoever receives a per_layer.csv can read it anywhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "report"))
from synthetic import make_run  # noqa: E402

# A finder that refuses, and not sys.modules['torch'] = None: scipy looks into sys.modules for a torch to speak to.
PRELUDE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "triton"):
            raise ModuleNotFoundError(f"{name} is blocked", name=name)
sys.meta_path.insert(0, Refuse())
"""
MODULES = sorted(
    f"analysis.{folder}.{path.stem}"
    for folder in ("results", "report")
    for path in (ROOT / "analysis" / folder).glob("*.py")
    if path.stem != "__init__"
)


def python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )


def test_every_module_imports_without_torch():
    done = python("\n".join(f"import {module}" for module in MODULES))
    assert done.returncode == 0, done.stderr


def test_report_builds_without_torch(tmp_path):
    run = make_run(tmp_path / "run", 8, 3)
    done = python(f"from analysis.report.html import build_report; build_report([{str(run)!r}], {str(run)!r})")
    assert done.returncode == 0, done.stderr
    assert (run / "index.html").is_file()


@pytest.mark.parametrize("module", ["torch", "triton"])
def test_the_block_works(module):
    assert "ModuleNotFoundError" in python(f"import {module}").stderr
