"""Sampled support: sampler and trainer agree on the truncated distribution from which a token was drawn."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import openai
import pytest
import tinker
import torch
from tinker import types

from benchmarks.sampled_support import CUTS, Drawn, Model, draw
from fovea.client import GatewayClient
from fovea.wire import tensors
from fovea.wire.errors import InvalidInput
from tests.e2e.stack import API_KEY, Stack

NEW_TOKENS, SEEDS = 48, (1, 2, 3)
VOCABULARY = 1000


async def gap(model: Model, drawn: list[Drawn], temperature: float, replays: bool) -> float:
    """Returns the largest difference of a sampled token's log-probability in nats."""
    return float(np.abs(await model.differences(drawn, temperature, replays)).max())


async def test_sampler_and_trainer_agree_on_what_was_left(stack: Stack) -> None:
    async with GatewayClient(stack.address("gateway"), API_KEY) as client:
        model = await Model.create(client, 2, 5e-3)
        session = await model.save()
        for name, cuts in CUTS.items():
            drawn = list(await asyncio.gather(*(draw(client, session, seed, NEW_TOKENS, cuts) for seed in SEEDS)))
            rows = [row for one in drawn for row in one.rows]
            assert len(rows) == NEW_TOKENS * len(SEEDS)
            for row, token in zip(rows, (token for one in drawn for token in one.tokens), strict=True):
                assert not row.size or token in row
            if "top_k" in cuts:
                assert all(0 < row.size <= cuts["top_k"] for row in rows)
            followed, without = [await gap(model, drawn, cuts.get("temperature", 1.0), way) for way in (True, False)]
            size = sum(len(one.support) for one in drawn) / len(rows)
            ids = np.mean([row.size for row in rows])
            print(
                f"{name:10} replay {followed:.1e} nat, without {without:.2f}; {ids:.0f} ids, {size:.0f} bytes a token"
            )
            assert followed <= 1e-3
            assert without > 0.02, "the sampler truncated nothing, so this test shows nothing"


async def test_only_requests_that_ask_get_the_truncated_distribution(stack: Stack) -> None:
    """The same seed in one batch: one request asks for it, one does not, one draws nothing, one truncates nothing."""
    async with GatewayClient(stack.address("gateway"), API_KEY) as client:
        model = await Model.create(client, 2, 5e-3)
        session, cuts = await model.save(), {"top_p": 0.8, "min_p": 0.2}
        asked, plain, greedy, whole = await asyncio.gather(
            draw(client, session, 5, NEW_TOKENS, cuts),
            draw(client, session, 5, NEW_TOKENS, cuts, records=False),
            draw(client, session, 5, NEW_TOKENS, {"temperature": 0.0}),
            draw(client, session, 5, NEW_TOKENS, {}),
        )
        assert asked.tokens == plain.tokens
        assert (asked.logprobs >= plain.logprobs - 1e-5).all()
        assert (asked.logprobs > plain.logprobs + 0.02).any()
        assert plain.support == b""
        assert greedy.support == whole.support == tensors.FULL_ROW * NEW_TOKENS
        assert await gap(model, [plain], 1.0, False) <= 1e-3  # also after min-p
        assert await gap(model, [greedy, whole], 1.0, False) <= 1e-3
        assert await gap(model, [greedy, whole], 1.0, True) <= 1e-3


async def test_a_support_that_does_not_fit_is_refused(stack: Stack) -> None:
    async with GatewayClient(stack.address("gateway"), API_KEY) as client:
        model = await Model.create(client, 2, 5e-3)
        drawn = await draw(client, await model.save(), 1, NEW_TOKENS, {"top_k": 5})
        first = replace(drawn, support=tensors.split_support(drawn.support)[0])
        with pytest.raises(InvalidInput, match=r"datum\[0\].loss_inputs.sampled_support has \d+ rows"):
            await model.logprobs([first.datum(True)], 1.0)
        outside = next(token for token in range(VOCABULARY) if token not in drawn.rows[0])
        other = replace(drawn, tokens=[outside, *drawn.tokens[1:]])
        with pytest.raises(InvalidInput, match="sampled_support does not contain the target"):
            await model.logprobs([other.datum(True)], 1.0)
        assert await gap(model, [drawn], 1.0, True) <= 1e-3


def test_openais_client_gets_the_ids_with_an_option(stack: Stack) -> None:
    with openai.OpenAI(base_url=f"{stack.base_url}/v1", api_key=API_KEY, max_retries=0) as client:
        asked: Any = {
            "model": stack.model_name, "messages": [{"role": "user", "content": "Go."}], "max_completion_tokens": 6,
            "logprobs": True, "top_logprobs": 8, "n": 2,
        }  # fmt: skip
        options = {"top_k": 5, "sampled_support": True, "return_token_ids": True, "ignore_eos": True}
        for choice in client.chat.completions.create(**asked, extra_body=options).choices:
            rows, tokens = choice.sampled_support, choice.token_ids  # type: ignore[attr-defined]
            assert all(len(row) == 5 and token in row for row, token in zip(rows, tokens, strict=True))
            assert choice.logprobs is not None
            for one in choice.logprobs.content or ():
                assert len(one.top_logprobs) == 5
                assert sum(np.exp(each.logprob) for each in one.top_logprobs) == pytest.approx(1.0, abs=1e-4)
        plain = client.chat.completions.create(**asked).choices[0]
        assert not hasattr(plain, "sampled_support")
        with pytest.raises(openai.BadRequestError, match="sampled_support"):
            client.chat.completions.create(**asked, stream=True, extra_body=options)


def test_the_official_sdk_sends_a_sparse_tensor(stack: Stack) -> None:
    """Log-probabilities and a step with a CSR tensor that has the ids as rows."""
    with stack.service_client() as service:
        training = service.create_lora_training_client(base_model=stack.model_name, rank=8).result()
        tokens = np.arange(20, 40)
        rows = torch.zeros(19, VOCABULARY)
        for place in range(9, 19):
            rows[place, [int(tokens[place + 1]), 7, 500 + place]] = 1.0
        targets = {"target_tokens": types.TensorData.from_numpy(tokens[1:])}
        given = types.ModelInput.from_ints(tokens[:-1].tolist())
        csr = types.TensorData.from_torch_sparse(rows)
        assert csr.sparse_crow_indices is not None
        full = training.forward([types.Datum(given, targets)], "cross_entropy").result()
        replayed = training.forward_backward(
            [types.Datum(given, targets | {"sampled_support": csr})], "cross_entropy"
        ).result()
        before, after = (answer.loss_fn_outputs[0]["logprobs"].to_numpy() for answer in (full, replayed))
        assert np.abs(before[:9] - after[:9]).max() <= 1e-5
        assert (after[9:] > before[9:] + 1.0).all()
        training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        wrong = types.TensorData.from_torch_sparse(rows.roll(1, 0))
        with pytest.raises(tinker.RequestFailedError, match="does not contain the target"):
            training.forward([types.Datum(given, targets | {"sampled_support": wrong})], "cross_entropy").result()
