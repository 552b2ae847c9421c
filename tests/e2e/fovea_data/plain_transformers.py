"""`python plain_transformers.py MODEL [ADAPTER]`: answers pictures as a stranger would, with transformers and PEFT.

Reads a JSON list of [picture, question] from standard input; writes the tokens of each greedy answer.
"""

import json
import sys

sys.modules.update(dict.fromkeys(("fovea", "fovea_data", "fovea_rollout", "services", "gateway"), None))

LONGEST = 8


def main(model: str, adapter: str | None = None) -> None:
    """Loads, answers, prints."""
    import torch
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor

    torch.set_num_threads(1)
    processor = AutoProcessor.from_pretrained(adapter or model)
    loaded = AutoModelForImageTextToText.from_pretrained(model).eval()
    if adapter is not None:
        from peft import PeftModel

        loaded = PeftModel.from_pretrained(loaded, adapter).eval()
    answers = []
    for picture, question in json.load(sys.stdin):
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
