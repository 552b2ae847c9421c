"""A rollout over gRPC equals one through the SDK, token for token."""

from __future__ import annotations

import tinker
from transformers import PreTrainedTokenizerBase

from fovea.api.v1 import weights_pb2
from fovea.client import GatewayClient
from fovea_rollout import (
    ChatTemplate,
    GrpcPolicy,
    Policy,
    RolloutSettings,
    SamplingSettings,
    TinkerPolicy,
    Trajectory,
    WeightVersions,
    run_rollouts,
)
from tests.e2e.fovea_rollout.environments import Looking, Walking
from tests.e2e.stack import API_KEY, Stack

ROLLOUTS = 12
LORA = weights_pb2.LoraConfig(rank=8, seed=1, train_attention=True, train_mlp=True)


async def play(policy: Policy, tokenizer: PreTrainedTokenizerBase, *stop: str) -> list[Trajectory]:
    settings = RolloutSettings(SamplingSettings(max_tokens=2, temperature=2.0, seed=5, stop=stop), max_turns=3)
    kinds = (Looking, Walking)
    factories = [lambda seed=seed: kinds[seed % 2](seed) for seed in range(ROLLOUTS)]
    trajectories = await run_rollouts(policy, ChatTemplate(tokenizer), factories, settings)
    assert [(t.end, t.failure) for t in trajectories] == [("done", None)] * ROLLOUTS
    return trajectories


def said(trajectories: list[Trajectory]) -> list[list[tuple[tuple[int, ...], str]]]:
    return [[(turn.sampled.ids, turn.sampled.stop_reason) for turn in t.turns] for t in trajectories]


async def test_the_same_tokens_as_through_the_sdk(
    stack: Stack, base_sampler: tinker.SamplingClient, tokenizer: PreTrainedTokenizerBase
) -> None:
    async with GatewayClient(stack.address("gateway"), API_KEY) as client:
        session = await client.create_session()
        sampling = await client.create_sampling_session(session, 0, base_model=stack.model_name)
        over_grpc, through_sdk = GrpcPolicy(client, sampling), TinkerPolicy(base_sampler)
        first = await play(over_grpc, tokenizer)
        assert said(first) == said(await play(through_sdk, tokenizer))
        word = tokenizer.decode([first[0].turns[0].sampled.ids[0]])
        stopped = await play(over_grpc, tokenizer, word)
        assert said(stopped) == said(await play(through_sdk, tokenizer, word))
        assert said(stopped) != said(first)
        assert tokenizer.decode(stopped[0].turns[0].sampled.ids).endswith(word), "a turn must keep its end token"
        await client.finish_session(session)


async def test_a_sample_says_which_weights_made_it(stack: Stack, tokenizer: PreTrainedTokenizerBase) -> None:
    async with GatewayClient(stack.address("gateway"), API_KEY) as client:
        session = await client.create_session()
        model = await client.create_model(session, 0, stack.model_name, LORA)
        saved = await client.save_for_sampler(model, 1)
        policy = GrpcPolicy(client, saved.sampling_session_id)
        policy.set_version(0, saved.snapshot.snapshot_id)
        policy.set_version(7)
        for trajectory in await play(policy, tokenizer):
            assert trajectory.versions == WeightVersions(0, 0), (
                "the version must come from the answer, not from the newest weights"
            )
        await client.finish_session(session)
