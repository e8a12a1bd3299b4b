"""Every kernel compiles for an H200's architecture. Needs no GPU: the interpreter alone would not notice if not."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from analysis.kernels import common, error_sums, gemm, quantize, weight

POINTERS = {
    "cast_ptr": "*bf16", "codes_ptr": "*i8", "fixed_ptr": "*i8", "shipped_ptr": "*i8", "groups_ptr": "*u8",
    "measured_ptr": "*u8", "a_ptr": "*i8", "b_ptr": "*i8", "y_ptr": "*bf16", "first_ptr": "*bf16",
    "second_ptr": "*bf16", "bias_ptr": "*bf16", "weight_ptr": "*bf16", "w_ptr": "*bf16", "out_ptr": "*fp64",
}


def kind(name, x):
    if name == "x_ptr":
        return x
    return POINTERS.get(name, "*fp32") if name.endswith("_ptr") else "fp32" if name == "eps" else "i32"


def build(kernel, x="*fp32", warps=4, stages=3, **constants):
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else kind(name, x) for name in names}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False}
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert built.asm["cubin"]


for x in ("*fp32", "*bf16", "*fp16"):
    for shipped in (True, False):
        build(quantize._codes_kernel, x, quantize.CODES_WARPS, SHIPPED=shipped, STEPS=3, SIZE=1024)
    build(quantize._rows_kernel, x, quantize.WARPS, SHIPPED=True, FIXED=True, CAST=x != "*bf16", STATS=True, SIZE=512)
build(quantize._rows_kernel, warps=quantize.WARPS, SHIPPED=False, FIXED=True, CAST=False, STATS=False, SIZE=512)  # wide
build(error_sums._sums_kernel, warps=1, HAS_BIAS=True, HAS_NORM=True, PAIR=True, SIZE=512)
for b in (gemm.LARGE, gemm.SMALL):
    build(gemm._linear_kernel, warps=b.warps, stages=b.stages, HAS_BIAS=True, EVEN_K=True, M=b.m, N=b.n, K=b.k, GROUP=8)
build(weight._weight_kernel, SIZE=1024)
build(common._combine_kernel, warps=8, PERIOD=8, MAX_AT=5, BLOCK=2048)
print("built")
"""


def test_kernels_compile_for_compute_capability_9(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    script = tmp_path / "build.py"  # Triton reads the source of kernels, not of what is passed by -c
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "built\n", done.stderr[-3000:]
