"""Measures the replay of sampled supports: `python -m benchmarks.sampled_support --address HOST:PORT --steps 20`.

Samples over the gRPC API of a running Fovea with top-p, top-k and min-p, and compares the log-probabilities of the
truncated distributions with those of the trainer: with the supports, and without, as a loss would see them otherwise.
The figures, for each seed, are the mean KL from sampler to trainer (the k3 estimate of `benchmarks.agreement`), the
mean and the largest difference of a token, and the ids and bytes of a support. `--wave 256` also measures the sampled
tokens per second of so many samples at once, without and with supports.
"""

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.figure import emit
from fovea.api.v1 import gateway_pb2, model_input_pb2, sampler_pb2, trainer_pb2, weights_pb2
from fovea.client import GatewayClient
from fovea.wire import tensors

CUTS: dict[str, dict[str, float]] = {
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 20},
    "min_p": {"min_p": 0.3},
    "all_warm": {"top_p": 0.9, "top_k": 50, "min_p": 0.01, "temperature": 1.3},
    "cold": {"top_p": 0.95, "temperature": 0.6},
}
LORA = weights_pb2.LoraConfig(rank=32, seed=1, train_attention=True, train_mlp=True, train_unembedding=True)
_PROMPT_TOKENS = 32

Logprobs = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Drawn:
    """One sampled sequence: its prompt, tokens, log-probabilities and packed supports."""

    prompt: list[int]
    tokens: list[int]
    logprobs: Logprobs
    support: bytes

    @property
    def rows(self) -> list[npt.NDArray[np.int64]]:
        """The ids of each token's support; empty if full."""
        ids, offsets = tensors.unpack_support(self.support, "support")
        return np.split(ids, offsets[1:-1])

    def datum(self, replays: bool) -> gateway_pb2.InputDatum:
        """Returns the sequence as a training example: each token predicts the next."""
        whole = [*self.prompt, *self.tokens]
        inputs = {"target_tokens": tensors.encode(np.array(whole[1:]))}
        if replays:
            packed = tensors.FULL_ROW * (len(self.prompt) - 1) + self.support
            inputs[tensors.SUPPORT] = tensors.encode(np.frombuffer(packed, np.uint8))
        return gateway_pb2.InputDatum(input=text_input(whole[:-1]), loss_inputs=inputs)


def text_input(tokens: Sequence[int]) -> model_input_pb2.ModelInput:
    """Returns token ids as an input."""
    chunk = model_input_pb2.TokenChunk(tokens=tensors.encode_tokens(tokens))
    return model_input_pb2.ModelInput(chunks=[model_input_pb2.Chunk(tokens=chunk)])


async def draw(
    client: GatewayClient, session: str, seed: int, new_tokens: int, cuts: dict[str, Any], records: bool = True
) -> Drawn:
    """Samples one sequence from a prompt of random ids, both set by the seed."""
    prompt = np.random.default_rng(seed).integers(10, 900, _PROMPT_TOKENS).tolist()
    request = gateway_pb2.SampleTokensRequest(
        sampling_session_id=session,
        prompt=text_input(prompt),
        sample_count=1,
        sampled_support=records,
        params=sampler_pb2.SamplingParams(
            max_tokens=new_tokens,
            seed=seed,
            stop=sampler_pb2.StopCondition(ignore_eos=True),
            **cuts,  # type: ignore[arg-type]
        ),
    )
    deltas = [event.delta async for event in client.sample(request) if event.WhichOneof("event") == "delta"]
    return Drawn(
        prompt,
        np.concatenate([tensors.decode_tokens(delta.tokens) for delta in deltas]).tolist(),
        np.concatenate([tensors.decode_floats(delta.logprobs) for delta in deltas]),
        b"".join(delta.sampled_support for delta in deltas),
    )


class Model:
    """A model, and its commands in order."""

    def __init__(self, client: GatewayClient, model_id: str) -> None:
        self._client, self._model_id, self._number = client, model_id, 0

    @classmethod
    async def create(cls, client: GatewayClient, steps: int, rate: float) -> "Model":
        """Creates a model and trains it on sequences of numbers, so that its distributions are not flat."""
        base = next(model.name for model in await client.capabilities() if model.is_trained)
        model = cls(client, await client.create_model(await client.create_session(), 0, base, LORA))
        whole = list(range(20, 60))
        inputs = {"target_tokens": tensors.encode(np.array(whole[1:]))}
        for _ in range(steps):
            data = [gateway_pb2.InputDatum(input=text_input(whole[:-1]), loss_inputs=inputs)]
            await model.logprobs(data, 1.0, backward=True)
            await client.optim_step(model._model_id, model._next(), trainer_pb2.AdamParams(learning_rate=rate))
        return model

    async def save(self) -> str:
        """Saves the weights for sampling; returns the sampling session."""
        return (await self._client.save_for_sampler(self._model_id, self._next())).sampling_session_id

    async def logprobs(
        self, data: Sequence[gateway_pb2.InputDatum], temperature: float, backward: bool = False
    ) -> list[Logprobs]:
        """Returns the trainer's log-probabilities of each example."""
        header = gateway_pb2.SubmitForwardBackwardHeader(
            model_id=self._model_id,
            seq_id=self._next(),
            loss_function="cross_entropy",
            backward=backward,
            loss_config={"temperature": temperature},
        )
        result = await self._client.forward_backward(header, data)
        return [tensors.decode(output.tensors["logprobs"]) for output in result.outputs]

    async def differences(self, drawn: Sequence[Drawn], temperature: float, replays: bool) -> Logprobs:
        """Returns trainer minus sampler for each sampled token."""
        outputs = await self.logprobs([one.datum(replays) for one in drawn], temperature)
        pairs = zip(outputs, drawn, strict=True)
        return np.concatenate([output[-len(one.tokens) :] - one.logprobs for output, one in pairs])

    def _next(self) -> int:
        self._number += 1
        return self._number


async def measure(client: GatewayClient, options: argparse.Namespace) -> None:
    """Prints the table."""
    model = await Model.create(client, options.steps, options.rate)
    session = await model.save()
    for name, cuts in CUTS.items():
        for seed in options.seeds:
            seeds = range(1000 * seed, 1000 * seed + options.prompts)
            drawn = await asyncio.gather(*(draw(client, session, one, options.tokens, cuts) for one in seeds))
            rows = [row for one in drawn for row in one.rows]
            facts = {
                "seed": seed,
                "tokens": len(rows),
                "ids": round(float(np.mean([row.size for row in rows])), 1),
                "full": sum(not row.size for row in rows),
                "bytes": round(sum(len(one.support) for one in drawn) / len(rows), 1),
                "note": options.note,
            }
            for replays in (True, False):
                found = await model.differences(drawn, cuts.get("temperature", 1.0), replays)
                for figure, value in (
                    ("kl", np.mean(np.expm1(found) - found)),
                    ("mean", np.abs(found).mean()),
                    ("largest", np.abs(found).max()),
                ):
                    emit(f"sampled_support.{figure}.{name}", [float(value)], "nat", replay=replays, **facts)
    for records in (False, True) if options.wave else ():
        rates = []
        for round_ in range(4):
            begun = time.perf_counter()
            seeds = range(10**6 * round_, 10**6 * round_ + options.wave)
            cuts = CUTS["top_p"]
            await asyncio.gather(*(draw(client, session, one, options.tokens, cuts, records) for one in seeds))
            rates.append(options.wave * options.tokens / (time.perf_counter() - begun))
        emit("sampled_support.sampling", rates[1:], "token/s", in_flight=options.wave, records=records)


async def _run(options: argparse.Namespace) -> None:
    async with GatewayClient(options.address, options.api_key) as client:
        await measure(client, options)


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", default="127.0.0.1:8001", help="gRPC address of the gateway")
    parser.add_argument("--api-key", default="tml-local")
    parser.add_argument("--steps", type=int, default=2, help="training steps before the measurement")
    parser.add_argument("--rate", type=float, default=5e-3)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128, help="sampled tokens of each prompt")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--wave", type=int, default=0, help="samples at once for the speed measurement; 0 skips it")
    parser.add_argument("--note", default="", help="note written into each line, such as the type of the weights")
    asyncio.run(_run(parser.parse_args()))


if __name__ == "__main__":
    main()
