"""Checks the datum of the vlm_classifier recipe: its lengths, its weights, and that it trains (check C100)."""

import asyncio
from collections.abc import AsyncIterator

import tinker
import torch
from tinker_cookbook.recipes.vlm_classifier.data import ClassifierDataset, ClassifierDatasetConfig
from tinker_cookbook.tokenizer_utils import get_tokenizer

from cookbook.programs.arguments import Arguments, read_command_line, write_metrics

BATCH_SIZE = 8
STEPS = 4
LEARNING_RATE = 2e-3


async def main(arguments: Arguments) -> None:
    """Checks a batch and trains on it. Raises AssertionError with the problem."""
    dataset = ClassifierDataset(
        ClassifierDatasetConfig(
            dataset="dpdl-benchmark/caltech101",
            dataset_split="train",
            model_name_for_tokenizer=arguments.model_name,
            renderer_name=arguments.renderer_name,
            batch_size=BATCH_SIZE,
        )
    )
    batch = dataset.get_batch(0)
    for datum in batch:
        check_datum(datum, arguments.model_name)
    losses = [loss async for loss in train(arguments, batch)]
    rows = ({"step": step, "loss": loss} for step, loss in enumerate(losses))
    write_metrics(arguments.log_path / "metrics.jsonl", rows)


def check_datum(datum: tinker.Datum, model_name: str) -> None:
    """Checks that inputs, targets and weights have one length, image slots included, and only the last answer has
    weight.
    """
    targets, weights = column(datum, "target_tokens"), column(datum, "weights")
    images = [chunk for chunk in datum.model_input.chunks if isinstance(chunk, tinker.types.ImageChunk)]
    assert len(images) == 1, f"{len(images)} images in the datum"
    assert datum.model_input.length == len(targets) == len(weights), "lengths differ"
    trained = [int(token) for token, weight in zip(targets, weights, strict=True) if weight]
    said = get_tokenizer(model_name).decode(trained)
    assert said.startswith("The subject in this photo is:"), f"weight lies on {said!r}"
    assert said.rstrip("\n").endswith("<|im_end|>"), f"weight lies on {said!r}"
    end = len(weights) - int(torch.count_nonzero(weights.flip(0).cumsum(0) == 0))
    assert torch.count_nonzero(weights[:end]) == len(trained) == end - int(weights.nonzero()[0]), "weights have gaps"


async def train(arguments: Arguments, batch: list[tinker.Datum]) -> AsyncIterator[float]:
    """Returns the mean loss per weighted token of each step on the same batch."""
    service = tinker.ServiceClient(base_url=arguments.base_url)
    training = await service.create_lora_training_client(arguments.model_name, rank=16, seed=0)
    weight = sum(float(column(datum, "weights").sum()) for datum in batch)
    for _ in range(STEPS):
        backward = training.forward_backward(batch, "cross_entropy")
        step = training.optim_step(tinker.AdamParams(learning_rate=LEARNING_RATE))
        result = await backward
        await step
        for datum, output in zip(batch, result.loss_fn_outputs, strict=True):
            logprobs = output["logprobs"].to_torch()
            assert len(logprobs) == datum.model_input.length, f"{len(logprobs)} log-probabilities"
            assert bool(torch.isfinite(logprobs).all()), "a log-probability is not finite"
        yield float(result.metrics["loss:sum"]) / weight


def column(datum: tinker.Datum, name: str) -> torch.Tensor:
    """Returns an input of the loss, [N]."""
    return datum.loss_fn_inputs[name].to_torch()


if __name__ == "__main__":
    asyncio.run(main(read_command_line()))
