"""Checks that pipelined steps of the cookbook's train_step give the same weights as sequential ones.

train_step keeps two forward_backward + optim_step in flight. Writes a row per datum with the largest difference of its
log-probabilities between two adapters that were trained on the same data, one with pipelined substeps and one that
waits for every result.
"""

import asyncio
from typing import Any

import tinker
import torch
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.rl.train import train_step
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.utils.misc_utils import split_list

from cookbook.programs.arguments import Arguments, read_command_line, write_metrics

SUBSTEPS = 4
SAMPLES = 16
RANK = 8
LEARNING_RATE = 1e-3
LEAST_MOVE = 1e-2


async def main(arguments: Arguments) -> None:
    """Trains and compares both adapters. Raises RuntimeError if training changed nothing."""
    service = tinker.ServiceClient(base_url=arguments.base_url)
    data = await sampled_data(service, arguments)
    pipelined, patient = [await new_adapter(service, arguments.model_name) for _ in range(2)]
    before = await logprobs(pipelined, data)
    await train_step(data, pipelined, LEARNING_RATE, SUBSTEPS, "importance_sampling")
    for batch in split_list(data, SUBSTEPS):
        await train_step(batch, patient, LEARNING_RATE, 1, "importance_sampling")
    one, other = await logprobs(pipelined, data), await logprobs(patient, data)
    moved = max((a - b).abs().max().item() for a, b in zip(one, before, strict=True))
    if moved < LEAST_MOVE:
        raise RuntimeError(f"training changed log-probabilities by {moved:.3g} at most, so there is nothing to compare")
    rows = ({"difference": (a - b).abs().max().item()} for a, b in zip(one, other, strict=True))
    write_metrics(arguments.log_path / "metrics.jsonl", ({"step": step, **row} for step, row in enumerate(rows)))


async def new_adapter(service: tinker.ServiceClient, model_name: str) -> tinker.TrainingClient:
    """Creates a LoRA with initial weights that depend only on its seed."""
    training: tinker.TrainingClient = await service.create_lora_training_client(model_name, rank=RANK, seed=7)
    return training


async def sampled_data(service: tinker.ServiceClient, arguments: Arguments) -> list[tinker.Datum]:
    """Returns samples of the base model with advantages of both signs, like those of a rollout."""
    renderer = get_renderer(arguments.renderer_name, get_tokenizer(arguments.model_name))
    prompt = renderer.build_generation_prompt([{"role": "user", "content": "Which sign is this?"}])
    sampler = await service.create_sampling_client(base_model=arguments.model_name)
    params = tinker.SamplingParams(max_tokens=12, seed=1, stop=[])
    answer = await sampler.sample(prompt, num_samples=SAMPLES, sampling_params=params)
    return [datum(prompt, sequence, 1.0 if i % 2 else -0.5) for i, sequence in enumerate(answer.sequences)]


def datum(prompt: tinker.ModelInput, sequence: Any, advantage: float) -> tinker.Datum:
    """Returns one sample; targets, sampled log-probabilities, advantages and mask [N] are zero over the prompt."""
    assert sequence.logprobs is not None
    seen = prompt.length - 1
    size = len(sequence.tokens)
    inputs = {
        "target_tokens": torch.tensor([0] * seen + list(sequence.tokens)),
        "logprobs": torch.tensor([0.0] * seen + list(sequence.logprobs)),
        "advantages": torch.tensor([0.0] * seen + [advantage] * size),
        "mask": torch.tensor([0.0] * seen + [1.0] * size),
    }
    model_input = prompt.append(tinker.types.EncodedTextChunk(tokens=list(sequence.tokens[:-1])))
    tensors = {name: tinker.TensorData.from_torch(value) for name, value in inputs.items()}
    return tinker.Datum(model_input=model_input, loss_fn_inputs=tensors)


async def logprobs(training: tinker.TrainingClient, data: list[tinker.Datum]) -> list[torch.Tensor]:
    """Returns the log-probabilities of every target, float32 [N] per datum, without gradients."""
    plain = [
        tinker.Datum(
            model_input=one.model_input,
            loss_fn_inputs={
                "target_tokens": one.loss_fn_inputs["target_tokens"],
                "weights": one.loss_fn_inputs["mask"],
            },
        )
        for one in data
    ]
    result = await training.forward(plain, "cross_entropy")
    return [output["logprobs"].to_torch() for output in result.loss_fn_outputs]


if __name__ == "__main__":
    asyncio.run(main(read_command_line()))
