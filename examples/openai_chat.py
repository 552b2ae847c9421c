"""Asks about a picture with OpenAI's client, and streams the answer. Run `fovea up` first."""

import base64
import os
import pathlib
from typing import Any

import openai

client = openai.OpenAI(base_url=f"{os.environ['TINKER_BASE_URL']}/v1", api_key=os.environ["TINKER_API_KEY"])
model = next(iter(client.models.list())).id  # or a tinker:// path of save_weights_for_sampler
picture = base64.b64encode(pathlib.Path("examples/square.png").read_bytes()).decode()
question: Any = [
    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}},
    {"type": "text", "text": "What colour is it?"},
]
messages: Any = [{"role": "user", "content": question}]
answer = client.chat.completions.create(
    model=model, messages=messages, max_completion_tokens=16, temperature=0.0, stream=True
)
for event in answer:
    print(event.choices[0].delta.content or "", end="", flush=True)
print()
