"""Every command of README that can run on a CPU does run, in README's order, in a folder of a user's own."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from analysis.cli import main
from analysis.results import schema

ROOT = Path(__file__).parents[1]
# `make` and pip are what runs this test; the rest of a line behind # is a comment.
NOT_HERE = ("make ", "pip ", ". .venv", "git ", "apt", "torchrun ", "python ")

MODEL = """
import sys
import torch
from torch import nn

class Attention(nn.Module):
    def __init__(self, names):
        super().__init__()
        self.names = names
        for name in names:
            setattr(self, name, nn.Linear(64, 64))

    def forward(self, x):
        for name in self.names:
            x = x + getattr(self, name)(x)
        return x

class Holder(nn.Module):
    def __init__(self, **children):
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, x):
        for child in self.children():
            x = child(x)
        return x

torch.manual_seed(0)
{build}
for _ in range(3):
    model(torch.randn(1, 8, 64))
"""
QKVO = "Holder(self_attn=Attention('qkvo'), cross_attn=Attention('qkvo'))"
FILES = {
    "generate.py": f"model = Holder(blocks=nn.Sequential({QKVO}, {QKVO}))",
    "my_script.py": "model = Holder(layer=nn.Sequential(Holder(attention=Attention(['query', 'key', 'value']))))",
    "my/module.py": "model = Holder(attn=Attention(['q_proj', 'k_proj', 'v_proj', 'o_proj']))",
}
QUANTIZER = """
import torch

def quantize_rows(x):
    scale = x.float().abs().amax(dim=1) / 127
    return (x.float() / scale.clamp(min=1e-12)[:, None]).round().clamp(-127, 127).to(torch.int8), scale
"""


def commands() -> list[str]:
    """README's shell lines without comments."""
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith(("#", *NOT_HERE))]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A user's folder with what README takes for granted: a model's script, a quantiser, a run in parts, a table."""
    home = tmp_path_factory.mktemp("a user's folder")
    for name, build in FILES.items():
        (home / name).parent.mkdir(exist_ok=True)
        (home / name).write_text(MODEL.replace("{build}", build))
    (home / "my" / "__init__.py").touch()
    (home / "my_kernels.py").write_text(QUANTIZER)
    whole = ROOT / "reports" / "tiny-world"
    calls = schema.read_per_call(whole / schema.PER_CALL)
    for part, mine in (("part-1", calls["call"] < 30), ("part-2", calls["call"] >= 30)):
        (home / "runs" / part).mkdir(parents=True)
        shutil.copy(whole / schema.RUN, home / "runs" / part)
        schema.write_per_call(calls[mine], home / "runs" / part / schema.PER_CALL)
    (home / "reports").mkdir()
    (home / "reports" / "tiny-world").symlink_to(whole)
    pd.DataFrame({"Name": ["blocks.0.self_attn.q"], "MSE": [1e-3]}).to_csv(home / "theirs.csv", index=False)
    return home


def test_there_are_commands():
    names = {line.split()[1] for line in commands()}
    assert {"measure", "report", "attach", "audit", "validate", "compare", "merge", "import"} <= names


def test_every_command_runs(home, monkeypatch, capsys):
    """In README's order: later lines read what earlier ones wrote."""
    monkeypatch.chdir(home)
    for line in commands():
        words = shlex.split(line)
        assert words[0] == "shrinkage", f"README shows {line!r}, which this test cannot run; add its start to NOT_HERE"
        if words[1] in ("attach", "audit"):  # they run somebody's program
            done = subprocess.run([sys.executable, "-m", "analysis.cli", *words[1:]], capture_output=True, text=True)
            assert done.returncode == 0, line + done.stdout + done.stderr
            continue
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code in (0, None), line + str(capsys.readouterr())
