"""Measures the agreement of sampler and trainer: `python -m benchmarks.agreement --base-url URL --rank 32 --steps 20`.

Samples tokens at several temperatures and compares the log-probabilities that `sample` returned with those of the
trainer for the same tokens and temperature, once with all datums in one call and once with each in its own call. The
figures, for each seed, are the mean KL from sampler to trainer (the k3 estimate, mean of exp(d) - 1 - d with d =
trainer - sampler, Schulman 2020) and the largest difference of any token, for prompts with and without an image, before
and after training steps. `--wave 256` also measures the tokens per second of so many samples at once.

With `--replay`, for mixtures of experts, each line comes twice: `replay=False` as usual, and `replay=True` with the
trainer using the experts that the sampler chose for each token. `agreement.experts` is the size of that data.

With `--float32 DIRECTORY` the base model in float32, on a GPU, scores the text too. Its distance to sampler and trainer
is the error of bfloat16 in each, and shows how large a difference between them is expected.

With `--chats`, for a pretrained model, the prompts are questions in the model's chat template instead of random tokens,
and the training steps teach the model its own answers.
"""

import argparse
import io
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import tinker
from tinker import SamplingParams

from benchmarks.client import Bench, datum, scored_part, take_step
from benchmarks.figure import emit

API_KEY = "tml-local"
_NEW_TOKENS = 128
_ASKED = ("Tell me about", "Write two sentences on", "Explain to a child", "List three facts about")
_TOPICS = (
    *("the sea", "a bakery", "prime numbers", "photosynthesis", "the French Revolution", "how to tie a knot"),
    *("winter", "gravity", "a short poem about rain", "recursion in programming", "the moon landing"),
    *("how bread rises", "why the sky is blue", "a letter to a friend", "the rules of chess", "a healthy breakfast"),
)
Logprobs = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Comparison:
    """Log-probabilities of the same sampled tokens. `way` says how the trainer's datums came: packed or alone."""

    way: str
    sampler: Logprobs
    trainer: Logprobs

    @property
    def differences(self) -> Logprobs:
        """Returns trainer minus sampler."""
        return self.trainer - self.sampler


@dataclass(frozen=True)
class Drawn:
    """Sampled tokens with their temperature, their prompt, and the log-probabilities that `sample` returned."""

    prompt: tinker.ModelInput
    tokens: list[int]
    logprobs: Logprobs
    temperature: float
    sequence: str = ""


def kl(differences: Logprobs) -> float:
    """Returns the mean KL from sampler to trainer in nats."""
    return float(np.mean(np.expm1(differences) - differences))


def random_prompts(bench: Bench, count: int, image_side: int, seed: int) -> list[tinker.ModelInput]:
    """Returns prompts of random tokens, each after an image unless its side is 0."""
    rng = np.random.default_rng(seed)
    return [bench.prompt(rng, length, image_side) for length in rng.integers(64, 512, count).tolist()]


def chat_prompts(bench: Bench) -> list[tinker.ModelInput]:
    """Returns 64 questions in the model's chat template."""
    tokenizer = bench.sampler.get_tokenizer()
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"{asked} {topic}."}], add_generation_prompt=True, tokenize=False
        )
        for topic in _TOPICS
        for asked in _ASKED
    ]
    return [tinker.ModelInput.from_ints(tokenizer.encode(text, add_special_tokens=False)) for text in texts]


def draw(
    sampler: Any, prompts: Sequence[tinker.ModelInput], temperature: float, seed: int
) -> Callable[[], list[Drawn]]:
    """Submits a sample from each prompt. Returns a function that waits for them."""
    params = SamplingParams(max_tokens=_NEW_TOKENS, temperature=temperature, seed=seed, stop=[])
    futures = [sampler.sample(prompt, 1, params) for prompt in prompts]

    def wait() -> list[Drawn]:
        sequences = [future.result(600).sequences[0] for future in futures]
        return [
            Drawn(prompt, list(one.tokens), np.asarray(one.logprobs, np.float64), temperature, one.sequence_id)
            for prompt, one in zip(prompts, sequences, strict=True)
        ]

    return wait


def score(
    training: tinker.TrainingClient,
    drawn: list[Drawn],
    experts: Sequence[tinker.TensorData] = (),
    ways: Sequence[str] = ("packed", "alone"),
) -> list[Comparison]:
    """Compares the trainer's log-probabilities of drawn tokens with the sampler's, in each way.

    With `experts`, the trainer replays them.
    """
    sampled = np.concatenate([one.logprobs for one in drawn])
    data, config = [datum(one.prompt, one.tokens) for one in drawn], {"temperature": drawn[0].temperature}
    for one, taken in zip(data, experts, strict=False):
        one.loss_fn_inputs["routed_experts"] = taken
    found = []
    for way in ways:
        calls = [data] if way == "packed" else [[one] for one in data]
        pending = [training.forward(call, "cross_entropy", config) for call in calls]
        outputs = [output for future in pending for output in future.result(600).loss_fn_outputs]
        trained = [scored_part(output, len(one.tokens)) for output, one in zip(outputs, drawn, strict=True)]
        found.append(Comparison(way, sampled, np.concatenate(trained)))
    return found


def experts_of(base_url: str, api_key: str, drawn: list[Drawn]) -> list[tinker.TensorData]:
    """Returns the experts of each sequence's tokens: rows of bytes, padded to words; an eighth of the size of int64
    indices.
    """
    found = []
    for one in drawn:
        answer = httpx.get(
            f"{base_url}/api/v1/routed_experts/{one.sequence}", headers={"X-API-Key": api_key}, timeout=60
        )
        answer.raise_for_status()
        rows = np.load(io.BytesIO(answer.content))
        rows = rows.reshape(len(rows), -1)
        padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % 8)))
        found.append(tinker.TensorData.from_numpy(np.ascontiguousarray(padded).view(np.int64)))
    return found


def train(bench: Bench, training: tinker.TrainingClient, steps: int, image_side: int, rate: float) -> None:
    """Trains on random text and images, so that the weights change."""
    rng = np.random.default_rng(99)
    for _ in range(steps):
        data = [datum(bench.prompt(rng, 96, side), bench.tokens(rng, 64)) for side in (0, image_side) * 4]
        take_step(training, data, rate)


def float32_logprobs(directory: str, device: str, drawn: list[Drawn]) -> Logprobs:
    """Returns the log-probabilities of the base model in float32 for the drawn tokens of text prompts."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    has_images = hasattr(AutoConfig.from_pretrained(directory), "vision_config")
    loader: Any = AutoModelForImageTextToText if has_images else AutoModelForCausalLM
    model = loader.from_pretrained(directory, dtype=torch.float32).to(device)
    found = []
    for one in drawn:
        tokens = torch.tensor([[*one.prompt.to_ints(), *one.tokens]], device=device)
        with torch.no_grad():
            logits = model(input_ids=tokens, logits_to_keep=len(one.tokens) + 1).logits[0, :-1].double()
        own = torch.log_softmax(logits, -1).gather(1, tokens[0, -len(one.tokens) :, None])
        found.append(own[:, 0].cpu().numpy())
    return np.concatenate(found)


def wave(bench: Bench, training: tinker.TrainingClient, count: int, repeats: int = 3) -> list[float]:
    """Measures sampled tokens per second; the first round warms up and is reported separately."""
    sampler = training.save_weights_and_get_sampling_client().result(600)
    rates = []
    for round_ in range(repeats + 1):
        begun = time.perf_counter()
        drawn = draw(sampler, random_prompts(bench, count, 0, 1000 + round_), 1.0, 1000 + round_)()
        rates.append(sum(len(one.tokens) for one in drawn) / (time.perf_counter() - begun))
    return rates[1:]


def _report(found: list[Comparison], kind: str, when: str, **sizes: Any) -> None:
    for one in found:
        differences = one.differences
        facts = {"way": one.way, "tokens": len(differences), **sizes}
        emit(f"agreement.kl.{kind}.{when}", [kl(differences)], "nat", **facts)
        emit(f"agreement.largest.{kind}.{when}", [float(np.abs(differences).max())], "nat", **facts)
        emit(f"agreement.mean.{kind}.{when}", [float(np.abs(differences).mean())], "nat", **facts)


def _report_float32(directory: str, device: str, training: tinker.TrainingClient, drawn: list[Drawn]) -> None:
    exact = float32_logprobs(directory, device, drawn)
    for one in score(training, drawn)[:1]:
        for name, values in (("sampler", one.sampler), ("trainer", one.trainer)):
            error = np.abs(values - exact)
            emit(f"agreement.float32.mean.{name}", [float(error.mean())], "nat", tokens=len(error))
            emit(f"agreement.float32.largest.{name}", [float(error.max())], "nat", tokens=len(error))


def measure(bench: Bench, options: argparse.Namespace) -> None:
    """Prints the figures before and after training."""
    training = bench.training(options.rank)
    if options.wave:
        rates = wave(bench, training, options.wave)
        emit("agreement.sampling", rates, "token/s", rank=options.rank, in_flight=options.wave, note=options.note)
    chats = chat_prompts(bench)[: options.prompts] if options.chats else None
    sides = {"text": 0} if chats else {"text": 0, "image": options.image_side}
    for when in ("before", "after") if options.steps else ("before",):
        kinds = sides if when == "after" or not options.only_after else {}
        sampler = training.save_weights_and_get_sampling_client().result(600)
        submitted = []  # submit all at once: the sampler needs as many steps for one prompt as for all
        for kind, side in kinds.items():
            for temperature in options.temperatures:
                sizes = {"rank": options.rank, "temperature": temperature, "steps": options.steps * (when == "after")}
                for seed in options.seeds:
                    prompts = chats or random_prompts(bench, options.prompts or 16, side, seed)
                    wait = draw(sampler, prompts, temperature, seed)
                    submitted.append((wait, kind, {"seed": seed, "note": options.note, **sizes}))
        for wait, kind, sizes in submitted:
            drawn = wait()
            if options.replay:
                experts = experts_of(options.base_url, API_KEY, drawn)
                emit("agreement.experts", [8 * experts[0].to_numpy().shape[1]], "B/token", **sizes)
                _report(score(training, drawn, experts, options.ways), kind, when, replay=True, **sizes)
                sizes["replay"] = False
            _report(score(training, drawn, (), options.ways), kind, when, **sizes)
        if when == "before":
            if options.float32:
                seed = options.seeds[0]
                drawn = draw(sampler, chats or random_prompts(bench, options.prompts or 16, 0, seed), 1.0, seed)()
                _report_float32(options.float32, options.device, training, drawn)
            rate = options.rate or (1e-4 if options.rank else 1e-5)
            if chats:
                data = [datum(one.prompt, one.tokens) for one in draw(sampler, chats, 1.0, options.seeds[0])()]
                for _ in range(options.steps):
                    take_step(training, data, rate)
            else:
                train(bench, training, options.steps, options.image_side, rate)


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--rank", type=int, default=32, help="0 trains all parameters")
    parser.add_argument(
        "--steps", type=int, default=20, help="training steps in between; 0 skips the measurement after them"
    )
    parser.add_argument("--only-after", action="store_true", help="skip the measurement before the steps")
    parser.add_argument("--rate", type=float, help="learning rate; default 1e-4, for all parameters 1e-5")
    parser.add_argument("--chats", action="store_true", help="ask questions in the chat template; text only")
    parser.add_argument(
        "--prompts", type=int, help="number of prompts; default 16 of random tokens, or all 64 questions"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[5, 6, 7, 8])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0, 0.5, 1.3])
    parser.add_argument(
        "--ways", nargs="+", choices=("packed", "alone"), default=["packed", "alone"], help="calls of the trainer"
    )
    parser.add_argument("--wave", type=int, default=0, help="samples at once for the speed measurement; 0 skips it")
    parser.add_argument("--note", default="", help="note written into each line, such as the type of the heads")
    parser.add_argument("--replay", action="store_true", help="measure with and without the sampler's experts")
    parser.add_argument("--image-side", type=int, default=448)
    parser.add_argument("--float32", help="checkpoint of the base model, run in float32 as the reference for both")
    parser.add_argument("--device", default="cuda:1", help="device of the float32 model")
    options = parser.parse_args()
    headers = {"X-Fovea-Routed-Experts": "1"} if options.replay else {}
    with Bench.open(options.base_url, API_KEY, headers) as bench:
        measure(bench, options)


if __name__ == "__main__":
    main()
