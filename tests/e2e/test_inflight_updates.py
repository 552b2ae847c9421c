"""All parameters are trained and pushed while answers are sampled: none is lost, and each token has its version."""

import asyncio
from functools import partial
from typing import Any

import numpy as np
import tinker

from benchmarks.inflight_push import Answer, Run, differences, draw, until
from fovea.client import GatewayClient
from tests.e2e.stack import API_KEY, Stack

TOLERANCE = 1e-3
ENOUGH = 6


def has(count: int, answer: Answer) -> bool:
    """Returns whether an answer has tokens of enough versions, and enough tokens of the last one."""
    return len(set(answer.makers)) >= count and answer.makers.count(answer.makers[-1]) >= ENOUGH


async def test_every_token_of_answers_in_flight_has_its_version(stack: Stack) -> None:
    """Each version scores all answers afterwards. A client of the SDK, which reads whole answers, loses none either."""
    async with GatewayClient(stack.address("gateway"), API_KEY) as client:
        run = await Run.create(client, rate=5e-3)
        async with run.alive():
            session = await run.step()
            answers = [Answer([20 + number, 30, 40]) for number in range(4)]
            enough = partial(has, 3)
            drawing = [
                asyncio.create_task(draw(client, session, number, 6000, answer, enough))
                for number, answer in enumerate(answers)
            ]
            for count in (1, 2):
                await until(lambda count=count: all(has(count, answer) for answer in answers), drawing)
                await run.step()
            await asyncio.gather(*drawing)
            assert [answer.error for answer in answers] == [""] * len(answers)
            versions = list(run.named)
            for answer in answers:
                assert list(dict.fromkeys(answer.makers)) == versions
            own, other = await differences(run, answers)
    assert own.size == sum(len(answer.tokens) for answer in answers)
    assert own.max() < TOLERANCE
    assert np.median(other) > 5 * TOLERANCE


def test_whole_answers_of_the_sdk_survive_pushes(stack: Stack, service: tinker.ServiceClient) -> None:
    """They are sampled as futures. A version that the client still has scores the first tokens."""
    training = service.create_lora_training_client(base_model=stack.model_name, rank=0).result()
    prompt = tinker.ModelInput.from_ints([20, 30, 40])
    data = [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints(list(range(20, 60))),
            loss_fn_inputs={"target_tokens": tinker.TensorData.from_numpy(np.arange(21, 61))},
        )
    ]
    sampling: Any = training.save_weights_and_get_sampling_client(kind="inflight").result()
    params = tinker.SamplingParams(max_tokens=400, stop=[], seed=1)
    asked = [sampling.sample(prompt, 2, params) for _ in range(4)]
    for _ in range(3):
        training.forward_backward(data, "cross_entropy").result()
        training.optim_step(tinker.AdamParams(learning_rate=5e-3)).result()
        training.save_weights_and_get_sampling_client(kind="inflight").result()
    sequences = [sequence for one in asked for sequence in one.result().sequences]
    assert [len(sequence.tokens) for sequence in sequences] == [400] * 8
    assert all(np.isfinite(sequence.logprobs).all() for sequence in sequences)
