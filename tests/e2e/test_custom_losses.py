"""A client's own loss gives the same result on server and client: loss, metrics, and weights after a step."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from transformers import PreTrainedTokenizerBase

from tests.e2e.prompts import Prompt, PromptBuilder, max_difference
from tests.e2e.stack import Stack
from tests.e2e.test_agreement import trainer_logprobs
from tests.e2e.test_bad_input import assert_user_error

NAMES = ("text", "one image", "two images", "image first")
STEP = tinker.AdamParams(learning_rate=5e-3)


def squared(logprobs: Any, weights: Any) -> Any:
    """The weighted example of the hosted documentation."""
    loss = (weights * logprobs**2).sum()
    return loss, {"custom/squared:sum": loss}


def clipped(logprobs: Any, sampled: Any, advantages: Any) -> Any:
    """A loss with a mean over the datum, a ratio, a bound, and metrics of both kinds."""
    ratio = torch.exp(logprobs - sampled)
    objective = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    clip = (ratio != ratio.clamp(0.8, 1.2)).float()
    return -objective.mean() - 0.01 * logprobs.std(), {
        "custom/clipped:mean": clip.mean(),
        "custom/tokens:sum": torch.ones_like(logprobs).sum(),
    }


RANKS = {squared: {"logprobs": 1, "weights": 1}, clipped: {"logprobs": 1, "sampled": 1, "advantages": 1}}


@pytest.fixture
def service(stack: Stack) -> Iterator[tinker.ServiceClient]:
    """A client with traced losses enabled and chunks of two datums."""
    with stack.service_client() as client:
        flags = {"custom_loss_server_side": True, "fwdbwd_max_chunk_len": 2}
        client.holder._client_config = client.holder.get_client_config().model_copy(update=flags)
        yield client


@pytest.fixture(scope="module")
def prompts(tokenizer: PreTrainedTokenizerBase) -> dict[str, Prompt]:
    catalogue = PromptBuilder(tokenizer).catalogue()
    return {name: catalogue[name] for name in NAMES}


def _data(prompts: dict[str, Prompt]) -> list[tinker.Datum]:
    data = []
    for seed, prompt in enumerate(prompts.values()):
        random = np.random.default_rng(seed)
        datum = prompt.datum()
        count = len(prompt.ids)
        numbers = {"weights": (0, 1), "sampled": (-8, 0.5), "advantages": (0, 1)}
        for name, (center, scale) in numbers.items():
            values = random.normal(center, scale, count).astype(np.float32)
            datum.loss_fn_inputs[name] = tinker.TensorData(data=values.tolist(), dtype="float32", shape=[count])
        data.append(datum)
    return data


@pytest.mark.parametrize("function", [squared, clipped])
def test_the_server_and_the_client_agree(
    stack: Stack, service: tinker.ServiceClient, prompts: dict[str, Prompt], function: Any
) -> None:
    """C92, including several chunks and datums with images."""
    uploaded = service.create_custom_loss(function, RANKS[function]).result()
    assert uploaded.loss_id
    data = _data(prompts)
    outcomes, scores = [], []
    for handle in (uploaded, replace(uploaded, loss_id=None)):
        training = service.create_lora_training_client(base_model=stack.model_name, rank=8, seed=5).result()
        result = training.forward_backward_custom(data, handle)
        training.optim_step(STEP).result()
        outcomes.append(result.result())
        scores.append(trainer_logprobs(training, prompts))
    server, client = outcomes
    assert "surrogate_loss:sum" in client.metrics
    assert "surrogate_loss:sum" not in server.metrics
    for key in ("loss:sum", *(key for key in client.metrics if key.startswith("custom/"))):
        assert server.metrics[key] == pytest.approx(client.metrics[key], rel=1e-5, abs=1e-5), key
    for ours, theirs in zip(server.loss_fn_outputs, client.loss_fn_outputs, strict=True):
        np.testing.assert_allclose(ours["logprobs"].data, theirs["logprobs"].data, atol=1e-5)
    with stack.service_client() as fresh:
        base = fresh.create_lora_training_client(base_model=stack.model_name, rank=8, seed=5).result()
        before = trainer_logprobs(base, prompts)
    for name in prompts:
        # AdamW's first step is the sign of the gradient; where that is nearly zero, rounding decides it.
        assert max_difference(scores[0][name], scores[1][name]) < 2e-2, name
        assert max_difference(scores[0][name], before[name]) > 0.2, name


def test_what_cannot_run_is_a_user_error_and_loses_nothing(
    stack: Stack, service: tinker.ServiceClient, prompts: dict[str, Prompt]
) -> None:
    def drawing(logprobs: Any) -> Any:
        return (logprobs * torch.rand_like(logprobs)).sum(), {}

    with pytest.raises(tinker.RequestFailedError, match=r"drawing.*rand_like.*calls torch\.rand_like") as caught:
        service.create_custom_loss(drawing, {"logprobs": 1}).result()
    assert_user_error(caught.value)

    def undefined(logprobs: Any) -> Any:
        return torch.log(logprobs).sum(), {}

    handle = service.create_custom_loss(undefined, {"logprobs": 1}).result()
    data = _data(prompts)
    training = service.create_lora_training_client(base_model=stack.model_name, rank=4).result()
    with pytest.raises(
        tinker.RequestFailedError, match=r"'undefined': the loss is nan; node 'log' \(torch\.log\)"
    ) as bad:
        training.forward_backward_custom(data, handle).result()
    assert_user_error(bad.value)
    with pytest.raises(tinker.RequestFailedError, match="gradients were partial"):
        training.optim_step(STEP).result()
    assert np.isfinite(
        training.forward_backward([prompts["text"].datum()], "cross_entropy").result().metrics["loss:sum"]
    )
    training.optim_step(STEP).result()
