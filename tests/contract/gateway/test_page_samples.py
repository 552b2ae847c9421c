"""Samples on the live page: search, log-probabilities of trainer and sampler side by side, and rewards by step."""

import base64
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tinker import types
from tokenizers import Tokenizer, models

from tests.contract.gateway.conftest import Stand, running
from tests.contract.gateway.requests import PNG, Rest
from tests.waiting import eventually

PROMPT = [1, 2, 3]


def datum(tokens: list[int], prompt: types.ModelInput | None = None) -> types.Datum:
    """Returns a policy-gradient datum of a prompt and its sampled tokens."""
    prompt = prompt or types.ModelInput.from_ints(PROMPT)
    whole = types.ModelInput(chunks=[*prompt.chunks, types.EncodedTextChunk(tokens=tokens[:-1])])
    length = whole.length
    targets = [0] * (length - len(tokens)) + tokens
    return types.Datum(
        model_input=whole,
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=targets, dtype="int64", shape=[length]),
            "logprobs": types.TensorData(data=[-0.25] * length, dtype="float32", shape=[length]),
            "advantages": types.TensorData(data=[1.0] * length, dtype="float32", shape=[length]),
        },
    )


async def step(
    rest: Rest, model_id: str, seq_id: int, data: list[types.Datum] | None = None, loss_fn: str = "importance_sampling"
) -> None:
    """Runs a loss and an optimizer step."""
    loss = {"data": data, "loss_fn": loss_fn} if data else {}
    answer = await rest.result((await rest.forward_backward(model_id, seq_id, **loss)).json()["request_id"])
    assert "error" not in answer, answer
    await rest.result((await rest.optim_step(model_id, seq_id + 1, learning_rate=0.5))["request_id"])


async def groups_of(
    http: httpx.AsyncClient, source: str, route: str = "live/samples", **query: Any
) -> list[dict[str, Any]]:
    """Returns the groups of a source, in page order."""
    answer = await http.get(route, params={"source": source, **query})
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["groups"]
    return found


def write_tokenizer(folder: Path) -> None:
    """Writes a tokenizer in which token 7 is the word `w7`."""
    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(1000)}, unk_token="w0"))
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("has_picture", [False, True])
async def test_the_trainers_values_stand_beside_the_samplers(stand: Stand, rest: Rest, has_picture: bool) -> None:
    model_id = await rest.create_model()
    await step(rest, model_id, 1)
    sampling_id = await rest.snapshot(model_id, 3)
    chunks: list[dict[str, Any]] = [{"type": "encoded_text", "tokens": PROMPT}]
    given: list[Any] = [types.EncodedTextChunk(tokens=PROMPT)]
    if has_picture:
        chunks.append({"type": "image", "data": base64.b64encode(PNG).decode(), "format": "png", "expected_tokens": 4})
        given.append(types.ImageChunk(data=PNG, format="png", expected_tokens=4))
    sample = (await rest.sample(sampling_id, 0, prompt={"chunks": chunks}, num_samples=2)).json()["request_id"]
    first, second = [sequence["tokens"] for sequence in (await rest.result(sample))["sequences"]]

    async def trained() -> list[list[float]]:
        return [one["trained"] for group in await groups_of(rest.http, model_id) for one in group["drawn"]]

    async def is_shown() -> bool:
        return await trained() == [[], []]

    await eventually(is_shown)

    # Only the first sequence is trained on. A datum with other tokens belongs to no sequence.
    prompt = types.ModelInput(chunks=given)
    await step(rest, model_id, 4, [datum(first, prompt), datum([*second[:-1], 9], prompt)])

    async def is_known() -> bool:
        return await trained() == [[-0.5] * 4, []]

    await eventually(is_known, 8)
    (group,) = await groups_of(rest.http, model_id)
    assert group["drawn"][0]["logprobs"] == [-0.25] * 4


async def test_samples_are_found_by_reward_step_and_text(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    async with running(Stand(tmp_path), tokenizer=str(tmp_path)) as stand, stand.http() as http:
        rest = Rest(http)
        model_id = await rest.create_model()
        sampled: list[list[list[int]]] = []
        for number in (1, 2, 3):
            await step(rest, model_id, 3 * number - 2)
            sampling_id = await rest.snapshot(model_id, 3 * number, number)
            prompt = {"chunks": [{"type": "encoded_text", "tokens": [700 + number]}]}
            sample = (await rest.sample(sampling_id, 0, prompt=prompt, num_samples=2)).json()["request_id"]
            sampled.append([one["tokens"] for one in (await rest.result(sample))["sequences"]])
            judged = [{"sequence_id": f"{sample}:{place}", "reward": number / 4 + place} for place in (0, 1)]
            judged[0]["truth"] = f"Answer {number}"
            body = {"model_id": model_id, "samples": judged}

            async def is_kept(body: dict[str, Any] = body) -> bool:
                return bool((await rest.post("live/reports", **body)).json()["samples_kept"] == 2)

            await eventually(is_kept)

        async def found(**query: Any) -> list[tuple[int, list[float]]]:
            groups = await groups_of(http, model_id, **query)
            return [(group["step"], [one["reward"] for one in group["drawn"]]) for group in groups]

        assert await found() == [(3, [0.75, 1.75])]
        assert await found(first_step=1) == [(3, [0.75, 1.75]), (2, [0.5, 1.5]), (1, [0.25, 1.25])]
        assert await found(last_step=2, least_reward=1.3) == [(2, [1.5])]
        assert await found(most_reward=0.6) == [(2, [0.5]), (1, [0.25])]
        assert await found(text="answer 2") == [(2, [0.5, 1.5])], "expected the right answer"
        assert await found(text="W701") == [(1, [0.25, 1.25])], "the prompt"
        word = next(f"w{token}" for token in sampled[2][1] if f"w{token}" not in str(sampled[:2]))
        assert (3, [1.75]) in [(at, rewards[-1:]) for at, rewards in await found(text=word)]
        assert await found(text="nothing of this kind") == []
        refused = await http.get("live/samples", params={"source": model_id, "least_reward": "high"})
        assert (refused.status_code, "least_reward is 'high'" in refused.text) == (400, True)

        # A search by another owner finds nothing.
        assert stand.gateway is not None
        other, _ = await stand.gateway.components.keys.create("bob", "", "read", None)  # type: ignore[arg-type]
        async with stand.http(other) as asking:
            assert await groups_of(asking, model_id, first_step=0) == []


async def test_rewards_are_counted_by_step(stand: Stand, rest: Rest) -> None:
    model_id = await rest.create_model()
    assert "rewards" not in (await rest.http.get(f"live/curves/{model_id}")).json()
    for number, rewards in ((1, [0.0, 0.0, 1.0]), (2, [0.5, 1.0, 1.0, 1.0])):
        await step(rest, model_id, 2 * number - 1)
        samples = [{"sequence_id": f"none:{place}", "reward": reward} for place, reward in enumerate(rewards)]
        assert (await rest.post("live/reports", model_id=model_id, samples=samples)).json()["step"] == number
    found = (await rest.http.get(f"live/curves/{model_id}")).json()["rewards"]
    assert (found["low"], found["step"], found["stride"]) == (0.0, [1, 2], 1)
    counts = np.asarray(found["counts"])
    assert counts.sum(1).tolist() == [3, 4]
    assert (counts[:, 0].tolist(), counts[:, -1].tolist()) == ([2, 0], [1, 3])
