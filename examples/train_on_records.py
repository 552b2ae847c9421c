"""Reinforcement learning on your own records in JSON lines or Parquet, such as the real Geometry-3K.

    python -m examples.train_on_records train.parquet --held-out test.parquet --out geometry3k

A row has `prompt` and `env_class`, a registered environment or your own `module:name`. The program prints rewards, and
writes the metrics of each step to OUT/metrics.jsonl. Started again, a killed run resumes at its
last evaluation.
"""

from __future__ import annotations

import argparse
import asyncio
import pathlib
import sys

from examples.experiment import first_model
from fovea_rollout import (
    ChatTemplate,
    LoopSettings,
    RolloutSettings,
    SamplingSettings,
    StepReport,
    TinkerPolicy,
    connect,
    evaluate,
    load_records,
    resumed_training_client,
    train,
)
from fovea_rollout.stopping import exiting_with_a_line


def read_arguments() -> argparse.Namespace:
    """Parses the command line. Settings without an option have the defaults of `LoopSettings`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("records", type=pathlib.Path, help="rows to learn from, .jsonl or .parquet")
    add("--held-out", type=pathlib.Path, help="rows to evaluate on")
    add("--out", type=pathlib.Path, required=True, help="folder of the run")
    add("--base-url", help="address of a Tinker server; default: TINKER_BASE_URL")
    add("--api-key", help="default: TINKER_API_KEY")
    add("--model", help="name of the model; default: the first that the server trains")
    add("--rank", type=int, default=32, help="rank of the LoRA (default: %(default)s)")
    add("--seed", type=int, default=0)
    for name in ("steps", "groups_per_step", "group_size", "evaluate_every"):
        default = getattr(LoopSettings, name)
        add(f"--{name.replace('_', '-')}", type=int, default=default, help="(default: %(default)s)")
    add("--learning-rate", type=float, help="learning rate of the first step; default: by the model's width")
    add("--max-tokens", type=int, default=1024, help="most tokens of an answer (default: %(default)s)")
    add(
        "--max-turns",
        type=int,
        default=RolloutSettings.max_turns,
        help="most turns of an episode (default: %(default)s)",
    )
    add(
        "--max-context",
        type=int,
        default=RolloutSettings.max_context,
        help="most tokens of a prompt and its answer (default: %(default)s)",
    )
    return parser.parse_args()


async def main(arguments: argparse.Namespace) -> None:
    """Trains, and prints the checkpoint to sample from."""
    sources = load_records(arguments.records)
    held_out = load_records(arguments.held_out) if arguments.held_out else []
    rollout = RolloutSettings(
        SamplingSettings(arguments.max_tokens, seed=arguments.seed), arguments.max_turns, arguments.max_context
    )
    settings = LoopSettings(
        arguments.steps,
        arguments.groups_per_step,
        arguments.group_size,
        arguments.learning_rate,
        evaluate_every=arguments.evaluate_every,
        rollout=rollout,
        seed=arguments.seed,
    )
    with exiting_with_a_line():
        service = connect(arguments.base_url, arguments.api_key)
    training = await resumed_training_client(service, arguments.out)
    is_new = training is None
    if training is None:
        model = arguments.model or await first_model(arguments.base_url, arguments.api_key)
        training = await service.create_lora_training_client(model, rank=arguments.rank, seed=arguments.seed)
    template = ChatTemplate(training.get_tokenizer())
    if is_new and held_out:
        policy = TinkerPolicy(await training.save_weights_and_get_sampling_client())
        seen = await evaluate(policy, template, held_out, settings.greedy, progress=None)
        print(f"before: held out {seen.reward_mean:.3f}", flush=True)
    await train(training, template, sources, settings, show, held_out=held_out, out=arguments.out)
    print("weights:", (await training.save_weights_for_sampler("final")).path)


def show(report: StepReport) -> None:
    """Prints one line per step."""
    print(report, flush=True)


if __name__ == "__main__":
    arguments = read_arguments()
    try:
        asyncio.run(main(arguments))
    except KeyboardInterrupt:
        sys.exit(f"stopped: the same command goes on after the last evaluation, from {arguments.out}/state.json")
