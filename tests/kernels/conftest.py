"""Every kernel test runs in the interpreter on a CPU and, marked gpu, on a CUDA device."""

import pytest

triton = pytest.importorskip("triton")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> str:
    if request.param == "cpu" and not triton.knobs.runtime.interpret:
        pytest.skip("kernels were compiled for a GPU in this process; the interpreter needs TRITON_INTERPRET=1")
    return request.param
