"""`shrinkage audit`: which rounding does a quantisation kernel use, and which edges break?

Exit 0: no defect. Exit 1: a defect was found. Exit 2: the target could not be audited.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from analysis.audit.forked import can_fork
from analysis.audit.load import split_target
from analysis.audit.process import Process

CLEAN, DEFECTIVE, NOT_AUDITED = 0, 1, 2


def register(app: typer.Typer) -> None:
    app.command("audit")(audit_command)


def audit_command(
    target: Annotated[str, typer.Argument(help="path/file.py:function or package.module:function")],
    adapter: Annotated[
        str | None, typer.Option(help="file.py:function, called as adapter(target, x) -> (codes, scales)")
    ] = None,
    device: Annotated[
        str, typer.Option(help="cpu (Triton kernels in the interpreter), cuda, or auto: cuda if there is one")
    ] = "auto",
    dtype: Annotated[
        list[str] | None, typer.Option(help="Input dtype, repeatable: bfloat16, float16 or float32. Default: all.")
    ] = None,
    scales: Annotated[
        str | None, typer.Option(help="per-row, per-group:G, per-tensor or static:S. Default: found out")
    ] = None,
    returns: Annotated[str | None, typer.Option(help="scale, inverse or absmax. Default: found out")] = None,
    shape: Annotated[str | None, typer.Option(help="ROWSxK that the target accepts. Default: 16x512")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the inputs.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds that one call may take.")] = 60.0,
    edges: Annotated[bool, typer.Option(help="Also check edge cases.")] = True,
    markdown: Annotated[Path | None, typer.Option(help="Write a report to paste into an issue.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the report as JSON.")] = None,
    source: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE kept in the report, repeatable: project=..., commit=...")
    ] = None,
) -> None:
    """Audit a quantisation kernel: its rounding, its bias, its edge cases.

    TARGET is called with a [rows, K] tensor and returns int8 codes (on CUDA also fp8 e4m3) and scales. It runs in a
    child process, so it may print, hang or crash. Exit status: 0 clean, 1 a defect was found, 2 could not be audited.

    Example: shrinkage audit my_kernels.py:quantize_rows --device cpu --markdown audit.md
    """
    out, err = Console(), Console(stderr=True)
    process = None
    try:
        split_target(target)
        if device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"unknown device {device!r}; expected auto, cpu or cuda")
        with err.status("importing") as status:  # draws on a terminal only
            # Without a GPU the child is a fork that has torch already; else both processes import it at the same time.
            fork = device == "cpu" and can_fork()
            if fork:
                import torch  # noqa: F401
            process = Process(target, adapter, device, fork)
            from analysis.audit import audit, render

            report = audit(
                process,
                dtypes=_dtypes(dtype),
                scales=scales,
                returns=returns,
                shape=_shape(shape),
                seed=seed,
                limit_s=timeout,
                edges=edges,
                source=_pairs(source or []),
                progress=lambda text: status.update(Text(text)),
            )
    except ValueError as error:  # CannotAudit is one
        err.print(Text.assemble(("cannot audit: ", "bold red"), str(error)), soft_wrap=True)
        raise typer.Exit(NOT_AUDITED) from None
    finally:
        if process is not None:
            process.end()
    out.print(render.text(report))
    if markdown is not None:
        markdown.write_text(render.markdown(report))
    if json is not None:
        report.write_json(json)
    raise typer.Exit(CLEAN if report.clean else DEFECTIVE)


def _dtypes(names: list[str] | None) -> tuple:
    import torch

    known = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    known |= {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    for name in names or []:
        if name not in known:
            raise ValueError(f"unknown dtype {name!r}; known: bfloat16, float16, float32")
    return tuple(known[name] for name in names) if names else (torch.bfloat16, torch.float16, torch.float32)


def _shape(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    rows, _, k = text.partition("x")
    if not (rows.isdigit() and k.isdigit() and int(rows) > 0 and int(k) > 1):
        raise ValueError(f"cannot read shape {text!r}; expected ROWSxK, as 16x512")
    return int(rows), int(k)


def _pairs(items: list[str]) -> dict[str, str]:
    pairs = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"cannot read source {item!r}; expected KEY=VALUE")
        pairs[key] = value
    return pairs
