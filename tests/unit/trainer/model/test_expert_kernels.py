"""The kernels around experts in Triton's interpreter equal torch's operators; they compile for a GPU."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32"}


@pytest.mark.slow
def test_they_give_what_operators_give() -> None:
    # The variable is read when Triton is imported, which happened earlier in this process.
    command = [sys.executable, "-W", "ignore", "-m", "tests.unit.trainer.model.interpreted_experts"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["copies and sums", "a layer in float32", "a layer in bfloat16"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TYPES)
def test_the_kernels_compile_for_hopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    from fovea_trainer.model import expert_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    rows = {"TOP_K": 8, "BLOCK": 2048}
    for kernel in (expert_kernels._copy_kernel, expert_kernels._sum_kernel):
        assert compiled(kernel, TYPES[dtype], rows)
    for kernel, blocks in (
        (expert_kernels.gate_kernel, expert_kernels.FORWARD),
        (expert_kernels.gate_gradient_kernel, expert_kernels.BACKWARD),
    ):
        for rank in (0, 32):
            assert compiled(kernel, TYPES[dtype], blocks.constants(rank, dtype), blocks.warps)


def compiled(kernel: Any, dtype: str, constants: dict[str, Any], warps: int = 4) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    known = {"scale": "fp32", "count": "i32", "size": "i32", "expert_of": "*i64", "token_of": "*i64"}
    known |= {"slot_of": "*i64"} | dict.fromkeys(constants, "constexpr")
    types = {name: known.get(name, f"*{dtype}") for name in kernel.arg_names}
    source = ASTSource(kernel, signature=types, constexprs=constants)
    options = {"num_warps": warps, "num_stages": 1}
    return compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["cubin"]
