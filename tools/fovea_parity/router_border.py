"""Compares sampler and trainer with the same experts, if the router's scores of two experts are nearly equal.

Both sides choose a token's experts as the top k of scores that each computes in its own order of additions. At equal
scores they may choose differently, and log-probabilities jump. Only that is accepted: the sampler's choice must be the
top k of the scores of an independent forward pass, up to `MOST_GAP`, and with this choice the trainer must agree.
"""

# ruff: noqa: N803 -- the suffix of a tensor's name is its shape

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import tinker
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fovea.wire.tensors import tensors_sha256
from fovea_data.model_export import export_model
from fovea_parity.prompts import API_KEY, Prompt, scores, trained_scores
from fovea_parity.trainer_part import datum_of
from fovea_trainer.batches.micro_batch import BatchLayout
from fovea_trainer.model.lora import LoraInjector
from fovea_trainer.model.packed_model import load_model
from fovea_trainer.settings import TrainerSettings

MOST_GAP = 1e-4
"""The largest gap at which a choice is arbitrary, relative to the token's largest score.

In gemma4_26b, scores in float32 differ from those in float64 by up to 4e-5 of the largest one. Half of all gaps are
above 2e-2, 0.4 % are below 1e-4."""

_WAIT_S = 300


@dataclass(frozen=True, slots=True)
class SameExperts:
    """A comparison of one prompt in which the trainer uses the sampler's experts.

    Attributes:
        apart: The largest difference between sampler and trainer at any token, in nat.
        gap: The result of `least_gap`.
    """

    apart: float
    gap: float

    @property
    def is_border(self) -> bool:
        """True if the sampler's choice is right up to rounding, and another choice would be as well."""
        return abs(self.gap) <= MOST_GAP


def least_gap(scores_TLE: Tensor, experts_TLK: Tensor) -> float:
    """Returns the least gap between the lowest score of a chosen expert and the highest score of another.

    It is relative to the token's largest score, and negative if the choice is not the top k.

    Args:
        scores_TLE: The scores of T tokens in L layers with E experts.
        experts_TLK: int64, the chosen experts.
    """
    chosen = scores_TLE.gather(-1, experts_TLK).amin(-1)
    other = scores_TLE.scatter(-1, experts_TLK, -torch.inf).amax(-1)
    return float(((chosen - other) / scores_TLE.abs().amax(-1)).min())


def compare(
    state: dict[str, Any], training: tinker.TrainingClient, directory: Path, prompts: Sequence[Prompt]
) -> list[SameExperts]:
    """Compares sampler and trainer at prompts, with the sampler's experts on both sides.

    Args:
        state: The contents of `up.json`.
        training: The trained model. It is saved, exported and loaded in this process for the router's scores.
        directory: The base model.
        prompts: The prompts.
    """
    path = training.save_weights_for_sampler("border").result(_WAIT_S).path
    address, headers = str(state["base_url"]), {"X-Fovea-Routed-Experts": "1"}
    service = tinker.ServiceClient(base_url=address, api_key=API_KEY, default_headers_overrides=headers)
    try:
        sampling = service.create_sampling_client(model_path=path).result(_WAIT_S)
        experts = [_sampled_experts(address, sampling, prompt) for prompt in prompts]
        sampled = [scores(sampling, prompt) for prompt in prompts]
    finally:
        service.close("success")
    trained = trained_scores(training, prompts, experts)
    with tempfile.TemporaryDirectory(prefix="fovea-border-") as folder:
        merged = export_model(
            path,
            Path(folder) / "merged",
            merged=True,
            base=directory,
            base_url=address,
            api_key=API_KEY,
            progress=False,
        )
        found = router_scores(merged, prompts, experts)
    gaps = [least_gap(one, torch.from_numpy(chosen)) for one, chosen in zip(found, experts, strict=True)]
    aparts = [float(np.abs(one - other).max()) for one, other in zip(sampled, trained, strict=True)]
    return list(map(SameExperts, aparts, gaps))


def _sampled_experts(base_url: str, sampling: tinker.SamplingClient, prompt: Prompt) -> npt.NDArray[np.int64]:
    """Returns the experts [N, L, K] with which the sampler computes a prompt."""
    one = tinker.SamplingParams(max_tokens=1)
    (sequence,) = sampling.sample(prompt.input, 1, one).result(_WAIT_S).sequences
    address = f"{base_url}/api/v1/routed_experts/{sequence.sequence_id}"
    found = httpx.get(address, headers={"X-API-Key": API_KEY}).raise_for_status()
    experts: npt.NDArray[np.int64] = np.load(io.BytesIO(found.content)).astype(np.int64)
    return experts


@torch.no_grad()
def router_scores(directory: Path, prompts: Sequence[Prompt], experts: Sequence[npt.NDArray[np.int64]]) -> list[Tensor]:
    """Computes the router's scores [N, L, E] of each prompt with these experts [N, L, K] for its tokens."""
    device = torch.device("cpu")
    settings = TrainerSettings(model=str(directory), device="cpu", dtype="float32", checkpoints=["unused"])
    family, _, model = load_model(settings, directory, device)
    LoraInjector(family.lora_targets(model.hf))
    found = []
    for prompt, chosen in zip(prompts, experts, strict=True):
        datum = datum_of(prompt.maker, 0, prompt.document, chosen.astype(np.int16))
        images = {tensors_sha256(image.tensors): image.tensors for image in prompt.document.images}
        batch = BatchLayout(prompt.maker.family, device).pack([datum], images, bool(images), None)
        with _ScoreRecorder(chosen) as recorder:
            model(batch, None, None)
        found.append(torch.stack(recorder.scores, 1))
    return found


class _ScoreRecorder(TorchFunctionMode):
    """A mode that keeps the scores of which routers choose `torch.topk`."""

    def __init__(self, experts: npt.NDArray[np.int64]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tokens, self._layers, self._top = experts.shape
        self.scores: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is torch.topk and found.indices.shape == (self._tokens, self._top):
            self.scores.append(args[0].clone())
        return found
