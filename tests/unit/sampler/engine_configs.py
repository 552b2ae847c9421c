"""vLLM's configuration of a tiny model, made in this process."""

from pathlib import Path
from typing import Any

from transformers import AutoConfig
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs

from fovea_sampler.engine.vllm_launch import register_eagerly


def engine_config(directory: Path, **arguments: Any) -> VllmConfig:
    """Returns vLLM's configuration of a checkpoint.

    As in a sampler, its classes are registered first. vLLM would inspect them in a process that imports vLLM again.
    """
    for architecture in AutoConfig.from_pretrained(directory).architectures:
        register_eagerly(architecture)
    return AsyncEngineArgs(model=str(directory), **arguments).create_engine_config()
