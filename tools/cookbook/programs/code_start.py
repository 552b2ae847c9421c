"""Teaches a model to answer the tasks of `code_rl` with a program that guesses, so that some rewards are positive.

Prompts are those of the recipe, tools included. Writes the loss of each step, and a record of the checkpoint as the
cookbook does.
"""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator

import tinker
from tinker_cookbook.recipes.code_rl import code_env
from tinker_cookbook.recipes.code_rl.deepcoder_tool import DeepcoderTool
from tinker_cookbook.renderers import TrainOnWhat, get_renderer
from tinker_cookbook.supervised.data import conversation_to_datum
from tinker_cookbook.tokenizer_utils import get_tokenizer

from cookbook.programs.arguments import Arguments, read_command_line, write_metrics

STEPS = 48
BATCH_SIZE = 8
LEARNING_RATE = 3e-3
RANK = 32


async def main(arguments: Arguments) -> None:
    """Trains on the tasks of the recipe and saves a checkpoint."""
    service = tinker.ServiceClient(base_url=arguments.base_url)
    training = await service.create_lora_training_client(arguments.model_name, rank=RANK, seed=0)
    losses = [loss async for loss in train(training, examples(arguments))]
    rows = ({"step": step, "loss": loss} for step, loss in enumerate(losses))
    write_metrics(arguments.log_path / "metrics.jsonl", rows)
    saved = await training.save_state("code_start")
    record = {"name": "final", "state_path": saved.path}
    (arguments.log_path / "checkpoints.jsonl").write_text(json.dumps(record) + "\n")


def examples(arguments: Arguments) -> list[tinker.Datum]:
    """Returns the recipe's training tasks, each answered by a program that prints a number from 1 to 4."""
    renderer = get_renderer(arguments.renderer_name, get_tokenizer(arguments.model_name))
    data = []
    for number, task in zip(itertools.cycle((1, 2, 3, 4)), code_env.load_deepcoder_tasks("train"), strict=False):
        asked = code_env._initial_messages(task, renderer, DeepcoderTool(task))
        said = {"role": "assistant", "content": f"```\nprint({number})\n```"}
        data.append(
            conversation_to_datum([*asked, said], renderer, None, train_on_what=TrainOnWhat.LAST_ASSISTANT_MESSAGE)
        )
    return data


async def train(training: tinker.TrainingClient, data: list[tinker.Datum]) -> AsyncIterator[float]:
    """Yields the mean loss per trained token of each step."""
    examples = itertools.cycle(data)
    for _ in range(STEPS):
        batch = list(itertools.islice(examples, BATCH_SIZE))
        backward = training.forward_backward(batch, "cross_entropy")
        step = training.optim_step(tinker.AdamParams(learning_rate=LEARNING_RATE))
        result = await backward
        await step
        weight = sum(float(datum.loss_fn_inputs["weights"].to_torch().sum()) for datum in batch)
        yield float(result.metrics["loss:sum"]) / weight


if __name__ == "__main__":
    asyncio.run(main(read_command_line()))
