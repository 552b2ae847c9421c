"""The first hour: starts Fovea, fine-tunes a model on 300 pictures, chats with it, and loads it with transformers.

    python first_hour.py FOLDER

It needs only the package with the extras `cpu` and `demo` (docs/guides/first-fine-tune.md), and prints the duration of
each step. The pictures are scans of digits from scikit-learn. The exit status is 1 if an answer over OpenAI's client or
of transformers differs from the Tinker API's in any token.
"""

from __future__ import annotations

import base64
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

os.environ["TINKER_TELEMETRY"] = "0"  # without this the SDK would send telemetry to this server

import openai
import tinker
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from fovea_data import Dataset, TunedModel, fine_tune, image_folder
from fovea_demo.digits import load_scans
from fovea_demo.up import running_fovea

KEY = "tml-local"
QUESTION = "Which digit is this?"
LONGEST = 8
"""The most tokens of an answer."""
FOVEA = str(pathlib.Path(sys.executable).with_name("fovea"))

Answers = list[list[int]]


def main(folder: pathlib.Path) -> int:
    """Runs all steps; their files are in the folder."""
    with timed("300 pictures, a folder a digit"):
        for number, scan in enumerate(load_scans()[0][:300]):
            place = folder / "pictures" / str(scan.digit)
            place.mkdir(parents=True, exist_ok=True)
            (place / f"{number}.png").write_bytes(scan.png)
        train, held_out = image_folder(folder / "pictures", QUESTION).split(0.2)

    with ExitStack() as until_the_end:
        with timed("fovea up, the first time: builds its tiny model"):
            up = running_fovea(folder / "fovea", None, "--port", "0", "--grpc-port", "0", timeout_s=1800.0)
            address = str(until_the_end.enter_context(up)["base_url"])
        print(f"watch it learn: {address}/", flush=True)
        with timed("fine-tune on 240 of them"):
            model = fine_tune(train, held_out, out=folder / "run", base_url=address, api_key=KEY, progress=False)
        print(
            f"{len(model.losses)} steps; of 60 held-out pictures {model.best['accuracy']:.0%} are read right",
            flush=True,
        )
        with timed("ask about the 60 through the Tinker API"):
            asked = by_tinker(model, held_out)
        with timed("chat about the 60 through OpenAI's client"):
            chatted = by_openai(address, model.weights, held_out)
        with timed("fovea export --merged"):
            command = [FOVEA, "export", model.weights, str(folder / "merged"), "--merged", "--base-url", address]
            subprocess.run(command, env=os.environ | {"TINKER_API_KEY": KEY}, check=True)
        model.close()
    with timed("load it with transformers and ask about the 60"):
        loaded = by_transformers(folder / "merged", held_out)

    for name, answers in (("OpenAI's client", chatted), ("transformers", loaded)):
        equal = sum(one == other for one, other in zip(answers, asked, strict=True))
        print(f"{name}: {equal} of {len(asked)} answers equal to the Tinker API's, token by token")
    return int(not asked == chatted == loaded)


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Prints the duration of a step."""
    begun = time.monotonic()
    yield
    print(f"{time.monotonic() - begun:7.1f} s  {what}", flush=True)


def by_tinker(model: TunedModel, rows: Dataset) -> Answers:
    """Returns the tokens of each greedy answer of the fine-tuned model's sampler."""
    assert model.sampling is not None
    params = tinker.SamplingParams(max_tokens=LONGEST, temperature=0.0)
    encoder = model.connection.encoder
    pending = [model.sampling.sample(encoder.prompt(row.question), 1, params) for row in rows]
    return [list(future.result().sequences[0].tokens) for future in pending]


def by_openai(address: str, weights: str, rows: Dataset) -> Answers:
    """Returns the same over `/v1`. `return_token_ids` is vLLM's extension of the protocol."""
    client = openai.OpenAI(base_url=f"{address}/v1", api_key=KEY)
    answers = []
    for row in rows:
        picture = base64.b64encode(pathlib.Path(row.where).read_bytes()).decode()
        content: Any = [
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}},
            {"type": "text", "text": QUESTION},
        ]
        answer = client.chat.completions.create(
            model=weights,
            messages=[{"role": "user", "content": content}],
            max_completion_tokens=LONGEST,
            temperature=0.0,
            extra_body={"return_token_ids": True},
        )
        answers.append(answer.choices[0].token_ids)  # type: ignore[attr-defined]
    return answers


def by_transformers(model: pathlib.Path, rows: Dataset) -> Answers:
    """Returns the same from the merged model, without Fovea."""
    processor = AutoProcessor.from_pretrained(model)
    loaded = AutoModelForImageTextToText.from_pretrained(model).eval()
    answers = []
    for row in rows:
        content = [{"type": "image", "image": Image.open(row.where)}, {"type": "text", "text": QUESTION}]
        inputs = processor.apply_chat_template(
            [{"role": "user", "content": content}],
            add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt",
        )  # fmt: skip
        with torch.no_grad():
            made = loaded.generate(**inputs, max_new_tokens=LONGEST, do_sample=False)
        answers.append(made[0, inputs["input_ids"].shape[1] :].tolist())
    return answers


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
