"""A handwritten training loop as the reference for the trainer: Hugging Face's model, PEFT and torch's optimizer.

`python -m benchmarks.plain_trainer MODEL --rank 32 --way packed < lengths.json` prints the seconds of each step as
JSON. Lengths are the tokens of one step's datums. All of them are text, so this loop does not run the vision tower.
Padded: sorted by length, with as many datums per micro-batch as fit `--tokens` after padding to the longest. Packed:
first fit, end to end, with flash attention over document bounds. Adapters are in bfloat16 like the model; PEFT's
default of float32 is a quarter slower.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fovea_trainer.batches.datum_decoding import DatumSize
from fovea_trainer.batches.places import plan
from fovea_trainer.model.packed_attention import PACKED_ATTENTION

_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]


def load(directory: str, rank: int, way: str) -> Any:
    """Returns the model on the GPU, with an adapter of `rank`; for rank 0, all of it is trained."""
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen3VLForConditionalGeneration

    implementation = "sdpa" if way == "padded" else "eager"
    model: Any = Qwen3VLForConditionalGeneration.from_pretrained(
        directory, dtype=torch.bfloat16, attn_implementation=implementation
    )
    if way == "packed":
        model.config._attn_implementation = PACKED_ATTENTION
        model.config.get_text_config()._attn_implementation = PACKED_ATTENTION
    model = model.cuda().train()
    if rank:
        config = LoraConfig(r=rank, lora_alpha=32, target_modules=_TARGETS)
        return get_peft_model(model, config, autocast_adapter_dtype=False)
    return model


def padded_batches(lengths: list[int], token_budget: int) -> list[list[int]]:
    """Returns batches sorted by length, to minimize padding, cut before the datum that would not fit."""
    batches: list[list[int]] = [[]]
    for length in sorted(lengths):
        if batches[-1] and max(*batches[-1], length) * (len(batches[-1]) + 1) > token_budget:
            batches.append([])
        batches[-1].append(length)
    return batches


def padded_loss(model: Any, lengths: list[int]) -> Tensor:
    """Returns the summed cross-entropy of one padded micro-batch."""
    width = max(lengths)
    mask_BT = torch.arange(width, device="cuda")[None] < torch.tensor(lengths, device="cuda")[:, None]  # noqa: N806
    tokens_BT = torch.randint(10, 900, mask_BT.shape, device="cuda")  # noqa: N806
    logits = model(input_ids=tokens_BT, attention_mask=mask_BT.long(), use_cache=False).logits
    return functional.cross_entropy(logits[mask_BT].float(), tokens_BT.roll(-1, 1)[mask_BT], reduction="sum")


def packed_loss(model: Any, lengths: list[int]) -> Tensor:
    """Returns the summed cross-entropy of one packed micro-batch."""
    tokens_1T = torch.randint(10, 900, (1, sum(lengths)), device="cuda")  # noqa: N806
    positions_1T = torch.cat([torch.arange(length) for length in lengths])[None].cuda()  # noqa: N806
    bounds = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
    documents = {f"cu_seq_lens_{side}": bounds for side in "qk"} | {f"max_length_{side}": max(lengths) for side in "qk"}
    positions_31T = positions_1T.expand(3, 1, -1)  # noqa: N806
    logits = model(input_ids=tokens_1T, position_ids=positions_31T, use_cache=False, **documents).logits
    return functional.cross_entropy(logits[0].float(), tokens_1T[0].roll(-1), reduction="sum")


def main() -> None:
    """Reads lengths; prints seconds and the peak gigabytes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--way", choices=("padded", "packed"), default="packed")
    parser.add_argument("--tokens", type=int, default=6144, help="tokens of one micro-batch")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    lengths: list[int] = json.load(sys.stdin)
    model = load(options.model, options.rank, options.way)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    loss: Callable[[Any, list[int]], Tensor] = padded_loss
    batches = padded_batches(lengths, options.tokens)
    if options.way == "packed":
        loss = packed_loss
        steps = plan([DatumSize(length, 0) for length in lengths], 1, options.tokens, 1).steps
        batches = [[lengths[index] for index in step.datums[0]] for step in steps]
    seconds = []
    for _ in range(options.repeats + 1):
        begun = time.perf_counter()
        for batch in batches:
            loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    print(json.dumps({"seconds": seconds[1:], "peak_gib": torch.cuda.max_memory_allocated() / 2**30}))


if __name__ == "__main__":
    main()
