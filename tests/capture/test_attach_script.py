"""`shrinkage attach` on whole scripts: nothing changes for them, and their results are kept however they end."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from analysis.capture.attach import Session
from analysis.capture.launch import Target, script_target
from analysis.capture.options import Options
from analysis.capture.store import Store
from analysis.cli.attach import _say
from analysis.kernels import common
from analysis.results import codes, schema
from analysis.sites import PRESETS, SitePattern

ROOT = Path(__file__).parents[2]
MODEL = """
import sys, torch
from tests.helpers import ToyModel
model = ToyModel()
def call(seed, rows=11):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        return model(*(torch.randn(1, n, 48, generator=generator) for n in (rows, 5)))
"""


def write(folder, text, name="script.py"):
    path = folder / name
    path.write_text(text)
    return path


def forked(folder, words, out="run", **options):
    """Attach in a forked child (quicker than a new process) -> (exit code, stdout, stderr, folder of the tables)."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            torch.set_num_threads(1)
            for number, name in ((1, "stdout"), (2, "stderr")):
                os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
            settings = {"out": folder / out, "pattern": PRESETS["wan"]} | options
            target = script_target([str(w) for w in words])
            session = Session(Options(**settings), target, lambda text: sys.stderr.write(text + "\n"))
            code = session.run()
            sys.stderr.write(session.problem)
        except BaseException as error:
            sys.stderr.write(f"escaped: {type(error).__name__}: {error}")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    _, status = os.waitpid(pid, 0)
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)
    return code, (folder / "stdout").read_text(), (folder / "stderr").read_text(), folder / out


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    script = write(folder, MODEL + "for i in range(3): print(call(i).sum().item())\n")
    return *forked(folder, [script], store=1, store_rows=4), folder


def test_a_script_that_ends_well_leaves_its_tables(finished):
    code, stdout, stderr, out, _ = finished
    assert code == 0 and len(stdout.split()) == 3 and stderr.strip() == ""
    per_layer, run = schema.read_per_layer(out / schema.PER_LAYER), schema.read_run(out / schema.RUN)
    assert len(per_layer) == 32 and (per_layer["calls"] == 3).all() and set(per_layer["world"]) == {"script.py"}
    assert run["complete"] and run["layers_expected"] == 16 and run["layers_silent"] == []
    assert run["device"] == "cpu" and run["engine"] == "rowwise" and set(run["variants"]) == {"shipped", "fixed"}
    counted = codes.find(out)
    assert set(counted["run_id"]) == set(per_layer["run_id"]) and set(counted["layer"]) == set(per_layer["layer"])


def test_the_first_calls_can_be_stored(finished):
    store = Store(finished[3] / "store")
    assert len(store) == 1 and len(store.layers) == 16 and store.manifest["complete"]
    assert len(next(store.events(store.shared_inputs()[0]))[1][0].x) == 4


@pytest.mark.parametrize(
    ("end", "code", "ended"),
    [
        ("sys.exit(3)", 3, "exit 3"),
        ("exit()", 0, "normally"),
        ("sys.exit('no more')", 1, "exit: no more"),
        ("raise RuntimeError('broken\\nbadly')", 1, "RuntimeError: broken"),
        ("raise KeyboardInterrupt", 130, "interrupted"),
        ("import os; os._exit(5)", 5, "os._exit(5)"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, "SIGTERM"),
    ],
)
def test_calls_are_kept_however_the_script_ends(tmp_path, end, code, ended):
    script = write(tmp_path, MODEL + f"call(0)\ncall(1)\n{end}\ncall(2)\n")
    got, _, stderr, out = forked(tmp_path, [script])
    run = schema.read_run(out / schema.RUN)
    assert (got, run["ended"], run["calls"]) == (code, ended, 2)
    assert run["complete"] == (ended == "normally")
    if "RuntimeError" in end:
        assert stderr.startswith("Traceback") and "analysis/capture" not in stderr
    if "no more" in end:
        assert stderr.startswith("no more\n")


def test_own_handlers_and_forked_children_are_left_alone(tmp_path):
    script = write(
        tmp_path,
        MODEL
        + """
import os, signal
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
call(0)
if os.fork() == 0:
    os._exit(0)
os.wait()
call(1)
os.kill(os.getpid(), signal.SIGTERM)
""",
    )
    code, _, _, out = forked(tmp_path, [script])
    assert code == 7 and schema.read_run(out / schema.RUN)["calls"] == 2


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("print('no torch')", "no layer matches 'wan'"),
        ("torch.nn.Linear(4, 4)(torch.ones(1, 4))", "no layer matches 'wan'"),
        ("model.blocks[0].self_attn.q(torch.ones(1, 48))", "no layer matches 'wan'"),
        ("torch.nn.Sequential(torch.nn.Linear(4, 4))(torch.ones(1, 4))", "linear layers of the models that ran: 0"),
        (
            "import torch.nn.functional as F\nfor m in model.modules():\n"
            "    if isinstance(m, torch.nn.Linear): m.__class__ = type('Quiet', (torch.nn.Linear,), "
            "{'__call__': lambda s, x: F.linear(x, s.weight, s.bias)})\ncall(0)",
            "16 layer(s) matched (blocks.0.self_attn.q, ",
        ),
    ],
)
def test_nothing_measured_is_an_error_that_says_what_was_seen(tmp_path, body, message):
    code, _, stderr, out = forked(tmp_path, [write(tmp_path, MODEL + body)])
    assert code == 1 and "nothing was measured: " in stderr and message in stderr, stderr
    assert not (out / schema.PER_LAYER).exists()


def test_a_script_that_failed_keeps_its_own_exit_code_when_nothing_was_measured(tmp_path):
    assert forked(tmp_path, [write(tmp_path, "import sys; sys.exit(4)")])[0] == 4


def test_layers_that_never_fire_are_listed(tmp_path):
    body = "model.blocks[1].forward = lambda x, context: x\ncall(0)\n"
    code, _, _, out = forked(tmp_path, [write(tmp_path, MODEL + body)])
    run = schema.read_run(out / schema.RUN)
    assert code == 0 and len(run["layers_silent"]) == 8 and run["layers_expected"] == 16


def test_a_hook_that_fails_lets_the_script_go_on(tmp_path):
    body = "print(call(0).sum().item())\nprint('after')\n"
    code, stdout, stderr, _ = forked(
        tmp_path, [write(tmp_path, MODEL + body)], pattern=SitePattern("--sites", r"blocks\.0\.norm1|.*\.q")
    )
    assert code == 1 and stdout.endswith("after\n") and "of type LayerNorm, not a linear layer" in stderr
    assert "measurement stopped, the script goes on" in stderr


def test_an_engine_that_cannot_run_where_the_model_is_lets_the_script_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "INTERPRETED", SimpleNamespace(value=False))
    script = write(tmp_path, MODEL + "call(0)\nprint('after')\n")
    code, stdout, stderr, _ = forked(tmp_path, [script], engine="triton")
    assert code == 1 and stdout == "after\n" and "stopped before the script's end: blocks.0.self_attn.q: " in stderr
    assert "engine 'triton' on cpu: Triton needs a CUDA device" in stderr and "escaped" not in stderr


def test_messages_keep_their_brackets(capsys):
    _say("layers with a [out, in] weight")
    assert capsys.readouterr().err == "shrinkage: layers with a [out, in] weight\n"


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        ([], ValueError, "nothing to run; usage: shrinkage attach"),
        (["-m"], ValueError, "nothing to run"),
        (["missing.py"], FileNotFoundError, "missing.py does not exist"),
        (["tests"], ValueError, "tests is a folder; name the script inside it"),
        (["pyproject.toml"], ValueError, "pyproject.toml is not Python: line"),
        (["-m", "no_such_module_here"], ValueError, "no module named 'no_such_module_here'"),
    ],
)
def test_what_cannot_be_run(monkeypatch, words, error, message):
    monkeypatch.chdir(ROOT)
    with pytest.raises(error, match=message):
        script_target(words)


def test_options_that_cannot_be_met_say_so_before_the_script_runs(tmp_path):
    target = Target((), module="this")
    with pytest.raises(ValueError, match=r"'seq_lens', 'grid_sizes'.*not for 'hf-bert'; use --tokens all"):
        Options(tmp_path, PRESETS["hf-bert"], tokens="valid")
    (tmp_path / schema.RUN).write_text("{}")
    with pytest.raises(FileExistsError, match=r"already holds run.json; choose another --out"):
        Session(Options(tmp_path, PRESETS["wan"]), target, print)
    script = write(tmp_path, MODEL + "print('ran')")
    with pytest.raises(ValueError, match="unknown engine 'cuda'; known: auto, triton, reference"):
        Options(tmp_path, PRESETS["wan"], engine="cuda")
    own = write(tmp_path, "def two(x, group): ...", "own.py")
    for variant, message in (
        ("nearest", "nearest"),
        (f"{tmp_path}/none.py:f", "none.py"),
        (f"{own}:one", "has no 'one'; its functions: two"),
        (f"{own}:two", "own.py:two(x, group) cannot be called with one tensor (missing a required argument: 'group')"),
    ):
        code, stdout, stderr, _ = forked(tmp_path, [script], out="other", variants=(variant,))
        assert code == 99 and "ValueError" in stderr and message in stderr and "ran" not in stdout


PLAIN = """
import os
os.environ["OMP_NUM_THREADS"] = "1"
import sys
before = "torch" in sys.modules
"""
SHOW = """
import hashlib, pickle
print(before, torch.get_num_threads(), __name__, __file__, sys.argv, sys.path[0], __spec__ is None)
out = [call(i) for i in range(2)]
print(hashlib.sha256(pickle.dumps([o.tolist() for o in out])).hexdigest(), torch.rand(3).tolist())
class Kept: pass
assert pickle.loads(pickle.dumps(Kept())).__class__ is Kept
import atexit
atexit.register(lambda: print("at exit", call(3).sum().item()))
"""


@pytest.mark.parametrize("as_module", [False, True])
def test_a_script_prints_the_same_with_and_without_attach(tmp_path, as_module):
    script = write(tmp_path, PLAIN + MODEL + SHOW, "odd_name.py")
    words = ["-m", "odd_name", "--flag", "x y"] if as_module else [str(script), "--flag", "x y"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    attach = ["-m", "analysis.cli", "attach", "--out", "run", "--"]
    plain, seen = (
        subprocess.run([sys.executable, *first, *words], cwd=tmp_path, env=env, capture_output=True, text=True)
        for first in ([], attach)
    )
    assert seen.returncode == plain.returncode == 0, seen.stderr
    if as_module:  # python -m puts the folder's path in sys.path as it was written, ''-relative or absolute
        assert plain.stdout.split("\n")[1:] == seen.stdout.split("\n")[1:]
    assert plain.stdout == seen.stdout
    assert schema.read_run(tmp_path / "run" / schema.RUN)["calls"] == 2


RANKED = """
import os
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
for i in range(rank, 6, 2):
    call(i, rows=5 + i)
    dist.barrier() if {barrier} else None
{end}
dist.destroy_process_group()
"""


def torchrun(folder, script):
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "analysis.cli"]
    words = [sys.executable, *launch, "attach", "--out", "ranked", "--", str(script)]
    return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=300)


def test_two_ranks_merge_to_the_single_process_table(tmp_path):
    done = torchrun(tmp_path, write(tmp_path, MODEL + RANKED.format(barrier=True, end="")))
    assert done.returncode == 0, done.stderr
    single = write(tmp_path, MODEL + "for i in range(6): call(i, rows=5 + i)", "single.py")
    assert forked(tmp_path, [single], out="single")[0] == 0
    tables = [schema.read_per_layer(tmp_path / name / schema.PER_LAYER) for name in ("single", "ranked")]
    sums = [t.set_index(["layer", "variant"]).sort_index()[schema.SUM_NAMES].astype("float64") for t in tables]
    pd.testing.assert_frame_equal(*sums, rtol=1e-9, atol=0)
    run = schema.read_run(tmp_path / "ranked" / schema.RUN)
    assert run["complete"] and run["ranks"] == 2 and run["calls_per_rank"] == [3, 3] and run["ranks_missing"] == []
    assert json.loads((tmp_path / "ranked" / "rank-1" / schema.RUN).read_text())["rank"] == 1
    counted, *of_ranks = (codes.find(tmp_path / "ranked" / name) for name in (".", "rank-0", "rank-1"))
    assert set(counted["run_id"]) == set(tables[1]["run_id"]) and set(counted["layer"]) == set(tables[1]["layer"])
    assert counted["count"].sum() == sum(part["count"].sum() for part in of_ranks)


def test_a_rank_that_raises_does_not_hang_the_others(tmp_path):
    end = "if rank == 1: raise RuntimeError('one rank broke')\ndist.barrier()"
    done = torchrun(tmp_path, write(tmp_path, MODEL + RANKED.format(barrier=False, end=end)))
    assert done.returncode != 0 and "one rank broke" in done.stderr
    run = schema.read_run(tmp_path / "ranked" / "rank-1" / schema.RUN)
    assert run["ended"] == "RuntimeError: one rank broke" and run["calls"] == 3 and not run["complete"]


def test_ranks_with_other_layers_are_not_merged_and_lose_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, expected, blocks in (("1", 0, 1), ("0", 1, 2)):
        monkeypatch.setenv("RANK", rank)
        script = write(tmp_path, MODEL + f"model.blocks = model.blocks[:{blocks}]\ncall(0)\n")
        code, _, stderr, out = forked(tmp_path, [script], wait_s=1.0)
        assert code == expected
    assert f"the ranks' tables stay in {out}/rank-*, not merged: rank 1 has other layers than rank 0" in stderr
    assert len(schema.read_per_call(out / "rank-0" / schema.PER_CALL)) == 32
    assert len(schema.read_per_call(out / "rank-1" / schema.PER_CALL)) == 16
