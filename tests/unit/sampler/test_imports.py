"""The heavy libraries stay in the engine's modules."""

import subprocess
import sys

LIGHT = [
    "fovea_services.sampler.settings",
    "fovea_services.sampler.sampler_servicer",
    "fovea_services.sampler.sample_validation",
    "fovea_services.sampler.pushes",
    "fovea_services.sampler.generation",
    "fovea.vision",
    "fovea_services.sampler.engine.vllm_launch",
    "fovea_services.sampler.engine.manifest_check",
]


def test_all_else_imports_neither_vllm_nor_torch() -> None:
    check = f"import sys, {', '.join(LIGHT)}; print({{'torch', 'vllm', 'transformers'}} & set(sys.modules) or 'light')"
    finished = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert finished.stdout.strip() == "light"
