"""The heavy libraries stay in the engine's modules."""

import subprocess
import sys

LIGHT = [
    "services.sampler.settings",
    "services.sampler.sampler_servicer",
    "services.sampler.sample_validation",
    "services.sampler.pushes",
    "services.sampler.generation",
    "fovea.vision",
    "services.sampler.engine.vllm_launch",
    "services.sampler.engine.manifest_check",
]


def test_all_else_imports_neither_vllm_nor_torch() -> None:
    check = f"import sys, {', '.join(LIGHT)}; print({{'torch', 'vllm', 'transformers'}} & set(sys.modules) or 'light')"
    finished = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert finished.stdout.strip() == "light"
