"""Measures the cost of many tenants' adapters: `python -m benchmarks.adapters MODEL_DIR --adapters 16 --max-loras 4`.

Starts a sampler without a gateway, pushes adapters of random weights over gloo, and requests `--tokens` greedy tokens
from all of them at once. The figure is the total tokens/s after a warm-up round. `--max-loras auto` lets the sampler
choose. The seconds until the sampler serves are printed too.
"""

import argparse
import asyncio
import pathlib
import time

import torch

from benchmarks.figure import emit
from fovea.api.v1 import sampler_pb2
from fovea.client.inference import SamplerClient
from fovea_sampler.engine.manifest_check import checkpoint_shapes
from tests.e2e.sampler.asking import ask, rendered, request_for
from tests.e2e.sampler.process import running_sampler
from tests.e2e.sampler.sender import Sender

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
THROUGH = sampler_pb2.StopCondition(ignore_eos=True)


def random_adapter(model: pathlib.Path, rank: int, dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    """Returns an adapter of all linear layers of the language model, with weights as small as after a few steps."""
    generator = torch.Generator().manual_seed(seed)
    adapter = {}
    for name, shape in checkpoint_shapes(model).items():
        module = name.removesuffix(".weight")
        if "visual" not in name and module.rpartition(".")[2] in LINEAR:
            a, b = (torch.randn(*size, generator=generator) * 0.01 for size in ((rank, shape[1]), (shape[0], rank)))
            adapter[f"base_model.model.{module}.lora_A.weight"] = a.to(dtype)
            adapter[f"base_model.model.{module}.lora_B.weight"] = b.to(dtype)
    return adapter


async def measure(address: str, model: pathlib.Path, options: argparse.Namespace) -> list[float]:
    """Returns the tokens/s of each round."""
    async with SamplerClient(address) as client:
        dtype = getattr(torch, (await client.info()).dtype)
        sender = await Sender(client).join()
        names = [f"tenant-{number}@1" for number in range(options.adapters)]
        first = random_adapter(model, options.rank, dtype, seed=0)
        for number, name in enumerate(names):  # the same tensors for all: drawing new ones would dominate the time
            await sender.push(name, {key: tensor.roll(number) for key, tensor in first.items()}, options.rank)
        rates = []
        for number in range(options.repeats + 1):
            prompt = rendered([[5 + number, *range(10, 9 + options.prompt_tokens)]])
            begun = time.perf_counter()
            await asyncio.gather(
                *(
                    ask(
                        client,
                        request_for(
                            prompt, name, max_tokens=options.tokens, temperature=0.0, stop=THROUGH, at_once=True
                        ),
                    )
                    for name in names
                )
            )
            rates.append(len(names) * options.tokens / (time.perf_counter() - begun))
        return rates[1:]


def main() -> None:
    """Prints the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--adapters", type=int, default=16)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--max-loras", default="auto")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    settings = ["--transfer", "gloo", "--port", "0"]
    settings += [] if options.max_loras == "auto" else ["--max-loras", options.max_loras]
    begun = time.perf_counter()
    with running_sampler(options.model, *settings) as sampler:
        ready_s = time.perf_counter() - begun
        room = sampler.wait_for_line("adapters: .* in one batch").strip().partition("adapters: ")[2]
        rates = asyncio.run(measure(sampler.address, options.model, options))
    sizes = {name: getattr(options, name) for name in ("adapters", "rank", "max_loras", "prompt_tokens", "tokens")}
    emit("adapters.tokens", rates, "token/s", ready_s=round(ready_s, 1), room=room, model=options.model.name, **sizes)


if __name__ == "__main__":
    main()
