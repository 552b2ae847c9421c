"""Compares sampler and trainer on a document after a few updates (check C119).

The cookbook's repository measures this with a test script that downloads its document and is not in its wheel. This is
the same measurement on the copy of that document that torch contains. The learning rate of the last step is 0, so the
log-probabilities of its forward pass are those of the weights that are then sampled.
"""

import asyncio
from pathlib import Path

import tinker
import torch
import torch.autograd.forward_ad
from tinker_cookbook.supervised.common import datum_from_model_input_weights
from tinker_cookbook.tokenizer_utils import get_tokenizer

from cookbook.programs.arguments import Arguments, read_command_line, write_metrics

UPDATES = 3
LEARNING_RATE = 1e-4
TOKENS = 2048
DOCUMENT = Path(torch.autograd.forward_ad.__file__).read_text()


async def main(arguments: Arguments) -> None:
    """Trains, then scores the same tokens with the sampler. The last row has the mean squared difference."""
    service = tinker.ServiceClient(base_url=arguments.base_url)
    training = await service.create_lora_training_client(arguments.model_name)
    ids: list[int] = get_tokenizer(arguments.model_name).encode(DOCUMENT)[:TOKENS]
    weights = torch.ones(len(ids))
    weights[0] = 0.0
    datum = datum_from_model_input_weights(tinker.ModelInput.from_ints(ids), weights)
    rows: list[dict[str, float]] = []
    for step in range(UPDATES + 1):
        rate = LEARNING_RATE if step < UPDATES else 0.0
        backward = training.forward_backward([datum], "cross_entropy")
        stepped = training.optim_step(tinker.AdamParams(learning_rate=rate))
        result = await backward
        await stepped
        rows.append({"step": step, "loss": float(result.metrics["loss:sum"]) / (len(ids) - 1)})
    trained = result.loss_fn_outputs[0]["logprobs"].to_torch()
    sampler = await training.save_weights_and_get_sampling_client()
    scored = await sampler.compute_logprobs(tinker.ModelInput.from_ints(ids))
    sampled = torch.tensor(scored[1:])
    rows[-1]["mse"] = float(((sampled - trained) ** 2).mean())
    write_metrics(arguments.log_path / "metrics.jsonl", rows)


if __name__ == "__main__":
    asyncio.run(main(read_command_line()))
