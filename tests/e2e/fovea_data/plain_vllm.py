"""`python plain_vllm.py MODEL [ADAPTER]`: answers questions about pictures with unmodified vLLM.

Reads a JSON list of [picture, question] from standard input; writes the tokens of each greedy answer.
"""

import base64
import json
import pathlib
import sys
from typing import Any

OURS = (
    "fovea",
    "fovea_data",
    "fovea_rollout",
    "fovea_renderer",
    "fovea_sampler",
    "fovea_trainer",
    "fovea_weights",
    "fovea_gateway",
)
sys.modules.update(dict.fromkeys(OURS, None))

LONGEST = 8


def main(model: str, adapter: str | None = None) -> None:
    """Loads the model, answers, prints."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    more: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 32} if adapter else {}
    engine = LLM(
        model,
        max_model_len=512,
        max_num_seqs=8,
        limit_mm_per_prompt={"image": 1, "video": 0},
        enforce_eager=True,
        **more,
    )
    messages = [
        [{"role": "user", "content": [_picture(picture), {"type": "text", "text": question}]}]
        for picture, question in json.load(sys.stdin)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=LONGEST)
    request = LoRARequest("own", 1, adapter) if adapter else None
    outputs = engine.chat(messages, params, lora_request=request, use_tqdm=False)
    print(json.dumps([list(output.outputs[0].token_ids) for output in outputs]))


def _picture(path: str) -> dict[str, Any]:
    data = base64.b64encode(pathlib.Path(path).read_bytes()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


if __name__ == "__main__":
    main(*sys.argv[1:])
