"""Sampled support: sampler and trainer agree on the truncated distribution that a token was drawn from."""

import asyncio
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import tinker
import torch
from tinker import types

from fovea.api.v1 import gateway_pb2, model_input_pb2, sampler_pb2
from fovea.client import GatewayClient
from fovea.wire import tensors
from fovea.wire.errors import InvalidInput
from tests.e2e.stack import API_KEY, Stack
from tests.e2e.test_grpc_front import ADAM, LORA

NEW_TOKENS, SEEDS = 48, (1, 2, 3)
VOCABULARY = 1000
CUTS = {
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 20},
    "min_p": {"min_p": 0.3},
    "all three, warm": {"top_p": 0.9, "top_k": 50, "min_p": 0.01, "temperature": 1.3},
    "cold": {"top_p": 0.95, "temperature": 0.6},
}


@dataclass(frozen=True)
class Drawn:
    """One sampled sequence: its prompt, tokens, log-probabilities and packed supports."""

    prompt: list[int]
    tokens: list[int]
    logprobs: npt.NDArray[np.float32]
    support: bytes

    @property
    def rows(self) -> list[npt.NDArray[np.int64]]:
        """The ids of each token's support; empty if full."""
        ids, offsets = tensors.unpack_support(self.support, "support")
        return np.split(ids, offsets[1:-1])

    def datum(self, replays: bool) -> gateway_pb2.InputDatum:
        """Returns the sequence as an example: each token predicts the next."""
        whole = [*self.prompt, *self.tokens]
        inputs = {"target_tokens": tensors.encode(np.array(whole[1:]))}
        if replays:
            packed = tensors.FULL_ROW * (len(self.prompt) - 1) + self.support
            inputs["sampled_support"] = tensors.encode(np.frombuffer(packed, np.uint8))
        return gateway_pb2.InputDatum(input=text_input(whole[:-1]), loss_inputs=inputs)


def text_input(tokens: list[int]) -> model_input_pb2.ModelInput:
    chunk = model_input_pb2.TokenChunk(tokens=tensors.encode_tokens(tokens))
    return model_input_pb2.ModelInput(chunks=[model_input_pb2.Chunk(tokens=chunk)])


async def draw(
    client: GatewayClient, session: str, seed: int, supported: bool = True, count: int = 1, **params: float
) -> Drawn:
    prompt = np.random.default_rng(seed).integers(0, VOCABULARY - 100, 12).tolist()
    request = gateway_pb2.SampleTokensRequest(
        sampling_session_id=session, prompt=text_input(prompt), sample_count=1, sampled_support=supported,
        top_sample_logprobs=4,
        params=sampler_pb2.SamplingParams(
            max_tokens=NEW_TOKENS, seed=seed, stop=sampler_pb2.StopCondition(ignore_eos=True), **params  # type: ignore[arg-type]
        ),
    )  # fmt: skip
    deltas = [event.delta async for event in client.sample(request) if event.WhichOneof("event") == "delta"]
    return Drawn(
        prompt,
        np.concatenate([tensors.decode_tokens(delta.tokens) for delta in deltas]).tolist(),
        np.concatenate([tensors.decode_floats(delta.logprobs) for delta in deltas]),
        b"".join(delta.sampled_support for delta in deltas),
    )


class Learner:
    """A model whose weights have moved, and its commands in order."""

    def __init__(self, client: GatewayClient, model: str) -> None:
        self._client, self._model, self._number = client, model, 0

    def _next(self) -> int:
        self._number += 1
        return self._number

    async def learn(self, data: list[gateway_pb2.InputDatum]) -> None:
        await self.run(data, 1.0, backward=True)
        await self._client.optim_step(self._model, self._next(), ADAM)

    async def save(self) -> str:
        return (await self._client.save_for_sampler(self._model, self._next())).sampling_session_id

    async def run(
        self, data: list[gateway_pb2.InputDatum], temperature: float, backward: bool = False
    ) -> list[npt.NDArray[np.float32]]:
        header = gateway_pb2.SubmitForwardBackwardHeader(
            model_id=self._model, seq_id=self._next(), loss_function="cross_entropy", backward=backward,
            loss_config={"temperature": temperature},
        )  # fmt: skip
        result = await self._client.forward_backward(header, data)
        return [tensors.decode(one.tensors["logprobs"]) for one in result.outputs]

    async def gap(self, drawn: list[Drawn], temperature: float, replays: bool) -> float:
        """Returns the largest difference of a sampled token's log-probability in nats."""
        outputs = await self.run([one.datum(replays) for one in drawn], temperature)
        pairs = zip(outputs, drawn, strict=True)
        return max(float(np.abs(output[-len(one.tokens) :] - one.logprobs).max()) for output, one in pairs)


async def learner(client: GatewayClient, stack: Stack) -> Learner:
    session = await client.create_session()
    made = Learner(client, await client.create_model(session, 0, stack.model_name, LORA))
    whole = list(range(20, 60))
    inputs = {"target_tokens": tensors.encode(np.array(whole[1:]))}
    for _ in range(2):  # so that the distribution is not flat
        await made.learn([gateway_pb2.InputDatum(input=text_input(whole[:-1]), loss_inputs=inputs)])
    return made


async def test_sampler_and_trainer_agree_on_what_was_left(stack: Stack) -> None:
    async with GatewayClient(stack.address("gateway"), API_KEY) as client:
        model = await learner(client, stack)
        session = await model.save()
        for name, params in CUTS.items():
            warmth = params.get("temperature", 1.0)
            drawn = list(await asyncio.gather(*(draw(client, session, seed, **params) for seed in SEEDS)))
            rows = [row for one in drawn for row in one.rows]
            assert len(rows) == NEW_TOKENS * len(SEEDS)
            for row, token in zip(rows, (token for one in drawn for token in one.tokens), strict=True):
                assert not row.size or token in row
            assert any(row.size for row in rows)
            if "top_k" in params:
                assert all(row.size == 0 or row.size <= params["top_k"] for row in rows)
            followed, without = [await model.gap(drawn, warmth, replays) for replays in (True, False)]
            size = sum(len(one.support) for one in drawn) / len(rows)
            mean = np.mean([row.size for row in rows])
            print(
                f"{name:16} replay {followed:.1e} nat, without {without:.2f}; {mean:.0f} ids, {size:.0f} bytes a token"
            )
            assert followed <= 1e-3
            assert without > 0.02, "nothing was cut off: this shows nothing"


async def test_only_who_asks_gets_the_truncated_distribution(stack: Stack) -> None:
    """The same seeds in one batch: some ask, some do not, some draw nothing, some cut nothing off."""
    async with GatewayClient(stack.address("gateway"), API_KEY) as client:
        model = await learner(client, stack)
        session = await model.save()
        asked, plain, greedy, whole = await asyncio.gather(
            draw(client, session, 5, top_p=0.8, min_p=0.2),
            draw(client, session, 5, supported=False, top_p=0.8, min_p=0.2),
            draw(client, session, 5, temperature=0.0),
            draw(client, session, 5),
        )
        assert asked.tokens == plain.tokens
        assert (asked.logprobs >= plain.logprobs - 1e-5).all()
        assert (asked.logprobs > plain.logprobs + 0.02).any()
        assert plain.support == b""
        assert greedy.support == whole.support == tensors.FULL_ROW * NEW_TOKENS
        assert await model.gap([plain], 1.0, False) <= 1e-3  # also after min-p
        assert await model.gap([greedy, whole], 1.0, False) <= 1e-3
        assert await model.gap([greedy, whole], 1.0, True) <= 1e-3


async def test_a_support_that_does_not_fit_is_refused(stack: Stack) -> None:
    async with GatewayClient(stack.address("gateway"), API_KEY) as client:
        model = await learner(client, stack)
        drawn = await draw(client, await model.save(), 1, top_k=5)
        short = Drawn(drawn.prompt, drawn.tokens, drawn.logprobs, drawn.support[: drawn.support.index(0) + 1])
        with pytest.raises(InvalidInput, match=r"datum\[0\].loss_inputs.sampled_support has \d+ rows"):
            await model.run([short.datum(True)], 1.0)
        other = Drawn(
            drawn.prompt, [(drawn.tokens[0] + 1) % VOCABULARY, *drawn.tokens[1:]], drawn.logprobs, drawn.support
        )
        if other.tokens[0] not in drawn.rows[0]:
            with pytest.raises(InvalidInput, match="sampled_support does not contain the target"):
                await model.run([other.datum(True)], 1.0)
        assert await model.gap([drawn], 1.0, True) <= 1e-3


def test_the_official_sdk_sends_a_sparse_tensor(stack: Stack) -> None:
    """Loss, log-probabilities and a step with a CSR tensor, whose rows are the ids."""
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
