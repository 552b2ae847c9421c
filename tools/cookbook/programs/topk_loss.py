"""Measures the loss of top-k self-distillation, which it does not log, at the start and at each checkpoint.

The cookbook builds the soft targets [N,K] from the teacher's top-k log-probabilities. A forward pass of every
checkpoint gives the loss on the same held-out data. Writes measured.jsonl next to the recipe's metrics.
"""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import tinker
import torch
from tinker_cookbook.distillation.sdft import build_sdft_teacher_prompt, build_topk_distillation_datums
from tinker_cookbook.renderers import Renderer, get_renderer
from tinker_cookbook.tokenizer_utils import Tokenizer, get_tokenizer

from cookbook.programs.arguments import Arguments, read_command_line, write_metrics

DEMONSTRATIONS = Path("tangqiaoyu/ToolAlpaca/train.jsonl")
COUNT = 8
TOPK = 8


async def main(arguments: Arguments) -> None:
    """Measures the start and all checkpoints of the run in `arguments.log_path`."""
    tokenizer = get_tokenizer(arguments.model_name)
    renderer = get_renderer(arguments.renderer_name, tokenizer)
    service = tinker.ServiceClient(base_url=arguments.base_url)
    teacher = await service.create_sampling_client(base_model=arguments.model_name)
    rows = demonstrations()
    prompts = [build_sdft_teacher_prompt(row["instruction"], row["output"], renderer) for row in rows]
    students = [student_datum(row["instruction"], row["output"], renderer, tokenizer) for row in rows]
    groups = [{"group_idx": index} for index in range(len(rows))]
    data, _ = await build_topk_distillation_datums(
        students, groups, teacher, prompts, topk=TOPK, vocab_size=len(tokenizer)
    )
    losses = [await loss(service, path, data) for path in checkpoints(arguments)]
    measured = ({"step": step, "topk_loss": value} for step, value in enumerate(losses))
    write_metrics(arguments.log_path / "measured.jsonl", measured)


def demonstrations() -> list[dict[str, str]]:
    """Returns the first rows of the recipe's dataset."""
    return [json.loads(line) for line in DEMONSTRATIONS.read_text().splitlines()[:COUNT]]


def checkpoints(arguments: Arguments) -> list[str]:
    """Returns the paths of the start and of the recipe's checkpoints, in order."""
    records = map(json.loads, (arguments.log_path / "checkpoints.jsonl").read_text().splitlines())
    return [*([arguments.state] if arguments.state else []), *(record["state_path"] for record in records)]


def student_datum(question: str, answer: str, renderer: Renderer, tokenizer: Tokenizer) -> tinker.Datum:
    """Returns the question with its answer; mask [N] float32 is 1 if the target is a token of the answer."""
    prompt = renderer.build_generation_prompt([{"role": "user", "content": question}])
    ids: list[int] = [*tokenizer.encode(answer, add_special_tokens=False), *stop_ids(renderer)]
    targets = [*prompt.to_ints()[1:], *ids]
    mask = [0.0] * (prompt.length - 1) + [1.0] * len(ids)
    return tinker.Datum(
        model_input=prompt.append(tinker.types.EncodedTextChunk(tokens=ids[:-1])),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData.from_torch(torch.tensor(targets)),
            "mask": tinker.TensorData.from_torch(torch.tensor(mask)),
        },
    )


def stop_ids(renderer: Renderer) -> list[int]:
    """Returns the first stop token, for renderers that stop at tokens."""
    stops: Sequence[str | int] = renderer.get_stop_sequences()
    return [stop for stop in stops[:1] if isinstance(stop, int)]


async def loss(service: tinker.ServiceClient, path: str, data: list[tinker.Datum]) -> float:
    """Returns the mean loss per position with a teacher, in nats."""
    training = await service.create_training_client_from_state(path)
    result = await training.forward(data, "cross_entropy")
    weight = sum(float(datum.loss_fn_inputs["weights"].to_torch().sum()) for datum in data)
    return float(result.metrics["loss:sum"]) / weight


if __name__ == "__main__":
    asyncio.run(main(read_command_line()))
