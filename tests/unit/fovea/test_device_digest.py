"""The digest kernel in Triton's interpreter equals torch's operators, and it compiles for a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fovea_weights.weight_transfer import _kernel

SIZES = (1, 7, 4096, 4097, 3 * 4096 + 5)
PROGRAM = """
import json, sys
import torch
from fovea_weights.weight_transfer import kernel_sum, torch_sum
generator = torch.Generator().manual_seed(1)
for size in json.loads(sys.argv[1]):
    words = torch.randint(-(2**63), 2**63 - 1, (size,), generator=generator)
    for start in (0, 1, 12345, 2**31 - 2, 2**40):
        assert kernel_sum(words, start).item() == torch_sum(words, start).item(), (size, start)
print("equal")
"""


pytest.importorskip("triton")


@pytest.mark.slow
def test_the_kernel_sums_as_the_operators_do() -> None:
    # The variable is read when Triton is imported, which happened earlier in this process.
    assert run(PROGRAM, str(list(SIZES)), TRITON_INTERPRET="1") == "equal\n"


def test_the_kernel_compiles_for_hopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for start in ("i32", "i64"):
        types = {"words": "*i64", "sums": "*i64", "start": start, "count": start, "BLOCK": "constexpr"}
        source = ASTSource(_kernel(), signature=types, constexprs={"BLOCK": 4096})
        assert compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
    assert list(tmp_path.rglob("*.cubin")), "nothing may remain from before"


def run(program: str, *arguments: str, **environment: str) -> str:
    command = [sys.executable, "-W", "ignore", "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    assert done.returncode == 0, done.stderr
    return done.stdout
