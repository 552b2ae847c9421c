"""Heavy libraries are imported only by the engine's modules."""

import subprocess
import sys

LIGHT = [
    "fovea_sampler.settings",
    "fovea_sampler.sampler_servicer",
    "fovea_sampler.sample_validation",
    "fovea_sampler.pushes",
    "fovea_sampler.generation",
    "fovea.vision",
    "fovea_sampler.engine.vllm_launch",
    "fovea_sampler.engine.manifest_check",
]


def test_all_else_imports_neither_vllm_nor_torch() -> None:
    check = f"import sys, {', '.join(LIGHT)}; print({{'torch', 'vllm', 'transformers'}} & set(sys.modules) or 'light')"
    finished = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert finished.stdout.strip() == "light"
