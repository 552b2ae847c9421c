"""Downloads an adapter's trained matrices with save_weights_external, as users do."""

from collections.abc import Mapping

import httpx
import numpy as np
import tinker
from numpy.typing import NDArray
from safetensors.torch import load
from tinker import types

from fovea_conformance.check import NotApplicable, expect, may_refuse
from fovea_conformance.target import unique_name

ADAPTER = "adapter_model.safetensors"
Matrices = dict[str, NDArray[np.float64]]


def download(rest: tinker.RestClient, path: str) -> dict[str, bytes]:
    """Downloads the files of an external-weights checkpoint without a key, as the SDK does; returns them by path."""
    answer = rest.get_external_weights_urls(path).result(60)
    expect(bool(answer.urls), f"{path} has no files")
    expect(answer.expires.tzinfo is not None, f"expires {answer.expires} has no time zone")
    files = {}
    for name, url in answer.urls.items():
        got = httpx.get(url, timeout=120, follow_redirects=True)
        expect(got.status_code == 200, f"{name} answered {got.status_code}: {got.text[:100]}")
        files[name] = got.content
    return files


def export_matrices(rest: tinker.RestClient, training: tinker.TrainingClient) -> Matrices:
    """Exports an adapter, and returns its matrices. Raises NotApplicable unless they are float32."""
    with may_refuse():
        path = training.save_weights_external(unique_name("probe"), ttl_seconds=3600).result(120).path
    files = download(rest, path)
    rest.delete_checkpoint_from_tinker_path(path).result(60)
    expect(ADAPTER in files, f"the export has no {ADAPTER}: {sorted(files)}")
    tensors = load(files[ADAPTER])
    coarse = {str(one.dtype) for one in tensors.values()} - {"torch.float32"}
    if coarse:
        raise NotApplicable(f"adapters are exported as {', '.join(coarse)}, which is too coarse to see a step")
    return {name: one.double().numpy() for name, one in sorted(tensors.items())}


def flat(matrices: Mapping[str, NDArray[np.float64]]) -> NDArray[np.float64]:
    """Returns the numbers of all matrices in one row."""
    return np.concatenate([matrices[name].ravel() for name in sorted(matrices)])


READ_OUT = types.AdamParams(learning_rate=1.0, beta1=0.0, beta2=0.0, eps=1.0)
"""Parameters of a step that moves each weight by -g / (|g| + 1). It is Adam without memory, and can be inverted."""


def gradient_behind(before: NDArray[np.float64], after: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the gradient of a READ_OUT step."""
    moved = before - after
    expect(bool((np.abs(moved) < 1).all()), "a step with eps 1 and learning rate 1 moved a weight by 1 or more")
    gradient: NDArray[np.float64] = moved / (1 - np.abs(moved))
    return gradient
