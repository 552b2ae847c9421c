"""`python plain_transformers.py MERGED MODEL ADAPTER`: answers questions about pictures with only transformers and
PEFT.

Reads a JSON list of [picture, question] from standard input; writes the tokens of each greedy answer, first of the
merged model and then, in another line, of the model with the adapter.
"""

import json
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


def main(merged: str, model: str, adapter: str) -> None:
    """Loads the models, answers, prints."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText

    torch.set_num_threads(1)
    asked = json.load(sys.stdin)
    answer(merged, AutoModelForImageTextToText.from_pretrained(merged).eval(), asked)
    loaded = AutoModelForImageTextToText.from_pretrained(model).eval()
    answer(adapter, PeftModel.from_pretrained(loaded, adapter).eval(), asked)


def answer(folder: str, loaded: Any, asked: list[tuple[str, str]]) -> None:
    """Answers with the processor in the folder."""
    import torch
    from PIL import Image
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(folder)
    answers = []
    for picture, question in asked:
        content = [{"type": "image", "image": Image.open(picture)}, {"type": "text", "text": question}]
        inputs = processor.apply_chat_template(
            [{"role": "user", "content": content}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
        with torch.no_grad():
            made = loaded.generate(**inputs, max_new_tokens=LONGEST, do_sample=False)
        answers.append(made[0, inputs["input_ids"].shape[1] :].tolist())
    print(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
