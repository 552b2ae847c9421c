"""Runs a loop that saves its state in a folder: python -m tests.e2e.fovea_rollout.resumable_run FOLDER URL KEY."""

import asyncio
import sys

import tinker

from examples.experiment import first_model
from fovea_rollout import (
    ChatTemplate,
    LoopSettings,
    RolloutSettings,
    SamplingSettings,
    ScriptedPlayer,
    TinkerPolicy,
    WarmUpSettings,
    resumed_training_client,
    train,
    warm_up,
)
from tests.e2e.fovea_rollout.test_loop import Watched

ROLLOUT = RolloutSettings(sampling=SamplingSettings(max_tokens=4, seed=1), max_turns=2)
SETTINGS = LoopSettings(6, 2, 4, learning_rate=1e-3, substeps=2, evaluate_every=2, rollout=ROLLOUT)


async def run(out: str, url: str, key: str) -> None:
    # A session that nothing ends keeps its model for a while, beside which no full-parameter model of a later test
    # fits.
    with tinker.ServiceClient(base_url=url, api_key=key) as service:
        training = await resumed_training_client(service, out)
        if training is None:
            training = await service.create_lora_training_client(await first_model(url, key), rank=8, seed=1)
            policy = TinkerPolicy(await training.save_weights_and_get_sampling_client())
            player = ScriptedPlayer(policy, training.get_tokenizer(), lambda prompt: "red")
            warm = WarmUpSettings(steps=2, rollout=ROLLOUT)
            await warm_up(training, ChatTemplate(training.get_tokenizer()), [Watched], player, warm)
        template = ChatTemplate(training.get_tokenizer())
        await train(training, template, [Watched] * 3, SETTINGS, print, held_out=[Watched], out=out)


if __name__ == "__main__":
    asyncio.run(run(*sys.argv[1:]))
