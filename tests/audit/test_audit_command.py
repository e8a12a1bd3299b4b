"""The command, and targets that behave badly in their child process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import hostile
import pytest
import torch
import typer
from typer.testing import CliRunner

from analysis.audit import CannotAudit, audit
from analysis.audit.load import load_target
from analysis.cli.audit import register

HERE = Path(__file__).parent


def shrinkage(*arguments: str):
    app = typer.Typer()
    register(app)
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


def test_printing_killing_and_hanging_cost_one_finding_each():
    report = audit(f"{HERE / 'hostile.py'}:nasty", dtypes=[torch.float32], limit_s=1.5, device="cpu")
    assert report.rounding == "half_even" and not report.clean
    defects = {finding.check: finding for finding in report.defects}
    assert set(defects) == {"tails", "rows"}
    assert defects["tails"].input == "K = 17" and "killed by SIGKILL" in defects["tails"].got
    assert defects["rows"].input == "17 rows" and "hung: no answer within 1.5 s" in defects["rows"].got


def test_from_the_command_line_too_where_the_child_is_a_fork(tmp_path):
    out = tmp_path / "nasty.json"
    words = [sys.executable, "-m", "analysis.cli", "audit", f"{HERE / 'hostile.py'}:nasty", "--device", "cpu"]
    words += ["--dtype", "fp32", "--timeout", "1.5", "--json", out]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "not JSON" not in done.stdout, done.stderr
    findings = {finding["check"]: finding["got"] for finding in json.loads(out.read_text())["findings"]}
    assert "killed by SIGKILL" in findings["tails"] and "hung: no answer within 1.5 s" in findings["rows"]


def test_upstreams_defect_in_triton_exits_1_with_text_json_and_markdown(tmp_path):
    json_file, markdown_file = tmp_path / "a.json", tmp_path / "a.md"
    target = f"{HERE / 'planted_triton.py'}:truncate"
    options = ("--device", "cpu", "--dtype", "bf16", "--shape", "8x128", "--source", "project=planted")
    done = shrinkage(target, *options, "--json", json_file, "--markdown", markdown_file)
    assert done.exit_code == 1, done.output
    assert "truncate" in done.output and "a row [127, 0.601562, 0, ...]" in done.output
    report = json.loads(json_file.read_text())
    assert report["target"] == target and report["rounding"] == "truncate" and report["clean"] is False
    assert report["versions"]["hardware"] == "CPU, Triton interpreter" and report["source"] == {"project": "planted"}
    for finding in report["findings"]:
        assert {"check", "severity", "input", "got", "expected"} <= set(finding)
        assert finding["severity"] in ("defect", "note")
    assert isinstance(report["figures"]["magnitude_bias_lsb"], float)
    text = markdown_file.read_text()
    assert text.startswith(f"### `{target}`: truncate, 1 defect\n")
    assert "| magnitude bias, LSB | -0.4" in text and "Smallest input that shows it: a row [127, 0.601562" in text


def test_a_clean_kernel_exits_0(tmp_path):
    out = tmp_path / "fixed.json"
    options = ("--device", "cpu", "--dtype", "fp32", "--shape", "8x128", "--no-edges")
    done = shrinkage("analysis.audit.targets:fixed", *options, "--json", out)
    assert done.exit_code == 0, done.output
    report = json.loads(out.read_text())
    assert report["rounding"] == "half_away" and report["clean"] is True and report["findings"] == []


def test_a_target_that_does_not_import_shows_its_own_traceback():
    done = shrinkage(f"{HERE / 'broken_import.py'}:quantize", "--device", "cpu")
    assert done.exit_code == 2
    assert "does not import" in done.output and "no such backend: abacus" in done.output
    assert "in _prepare" in done.output and "analysis/audit" not in done.output and "importlib" not in done.output


def test_an_adapter_calls_another_signature():
    target, adapter = f"{HERE / 'hostile.py'}:other_signature", f"{HERE / 'hostile.py'}:adapter"
    report = audit(load_target(target, adapter), dtypes=[torch.float32], edges=False)
    assert report.rounding == "truncate" and report.layout.startswith("per row")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_where_there_is_none_exits_2():
    done = shrinkage("analysis.audit.targets:fixed", "--device", "cuda")
    assert done.exit_code == 2 and "torch sees no CUDA device here" in done.output


def test_a_target_that_hangs_at_once_cannot_be_audited():
    with pytest.raises(CannotAudit, match=r"hung: no answer within 0\.5 s"):
        audit(f"{HERE / 'hostile.py'}:hangs", dtypes=[torch.float32], limit_s=0.5)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("kernels.py", "cannot read target 'kernels.py': expected path/file.py:function"),
        ("nowhere/kernels.py:f", "no file nowhere/kernels.py"),
        ("package:not a name", "cannot read target"),
    ],
)
def test_targets_that_cannot_be_read(target, message):
    done = shrinkage(target)
    assert done.exit_code == 2 and message in done.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--dtype", "fp64"), "unknown dtype 'fp64'"),
        (("--shape", "16"), "cannot read shape '16'"),
        (("--source", "commit"), "cannot read source 'commit'"),
        (("--device", "tpu"), "unknown device 'tpu'"),
    ],
)
def test_options_that_cannot_be_read(options, message):
    done = shrinkage("analysis.audit.targets:reference_fixed", *options)
    assert done.exit_code == 2 and message in done.output


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (hostile.no_codes, r"expected one int8 or float8_e4m3fn tensor of codes, got float32 \[16, 512\]"),
        (hostile.int32_codes, r"expected one int8 .* got int32 \[16, 512\], float32 \[16\]"),
        (hostile.two_scales, "expected one floating tensor of scales beside the codes"),
        (hostile.transposed_codes, r"codes have shape \[512, 16\], the input \[16, 512\]"),
        (hostile.exits, "SystemExit: enough"),
        pytest.param(
            hostile.needs_cuda,
            "CUDA|NVIDIA",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_not_a_quantiser_cannot_be_audited(target, message):
    with pytest.raises(CannotAudit, match=message):
        audit(target)


def test_a_missing_name_lists_what_there_is():
    sys.path.insert(0, str(HERE))
    with pytest.raises(ValueError, match=r"has no 'quantise'; it defines .*half_even"):
        load_target("planted_torch:quantise")


def test_a_file_whose_package_wants_what_is_not_here_is_loaded_by_itself(tmp_path):
    for name in ("wanting", "wanting_too"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("import no_such_module_at_all\n")
    alone = tmp_path / "wanting" / "kernels.py"
    alone.write_text("def quantise(x):\n    return x\n")
    assert load_target(f"{alone}:quantise")(3) == 3
    relative = tmp_path / "wanting_too" / "kernels.py"
    relative.write_text("from . import other\n\n\ndef quantise(x):\n    return x\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_module_at_all"):
        load_target(f"{relative}:quantise")
