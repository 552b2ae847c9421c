"""The adapter kernels in Triton's interpreter equal float64 products; they compile for a GPU."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")


@pytest.mark.slow
def test_they_give_the_products_of_each_rows_own_adapter() -> None:
    # The variable is read when Triton is imported, which happened earlier in this process.
    command = [sys.executable, "-W", "ignore", "-m", "tests.unit.sampler.interpreted_adapters"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["equal 7", "equal 20", "equal 150", "equal 9"]


@pytest.mark.parametrize("slices", [1, 3])
@pytest.mark.parametrize("rows", [64, pytest.param(2048, marks=pytest.mark.slow)])
def test_they_compile_for_hopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, slices: int) -> None:
    from fovea_sampler import lora_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    shrink = lora_kernels.shrink_blocks(rows, 2560)
    assert compiled(lora_kernels._shrink, {**shrink, "SLICES": slices}, 3)
    expand = {
        **lora_kernels.expand_blocks(rows),
        "SPLIT": shrink["SPLIT"],
        "SLICES": slices,
        "ALIGNED": 8,
        "EQUAL": False,
    }
    assert compiled(lora_kernels._expand, expand | {"B_TYPE": lora_kernels.tl.bfloat16}, 2)


POINTERS = {"x": "bf16", "out": "fp32", "reduced": "fp32", "y": "bf16", "part_sizes": "i64"}


def compiled(kernel: Any, constants: dict[str, Any], stages: int) -> Any:
    """Returns the machine code for Hopper."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    several = constants["SLICES"] > 1
    known = {name: f"*{kind}" for name, kind in POINTERS.items()}
    known |= dict.fromkeys(("tokens", "counts", "starts", "slots", "firsts", "ranks", "widths"), "*i32")
    known |= dict.fromkeys(("a", "b"), "*i64" if several else "*bf16") | {"part_starts": "*i64" if several else "i32"}
    known |= dict.fromkeys(constants, "constexpr")
    types = {name: known.get(name, "i32") for name in kernel.arg_names}
    source = ASTSource(kernel, signature=types, constexprs=constants)
    options = {"num_warps": 4, "num_stages": stages}
    return compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["cubin"]
