"""The parts of the demo on a real model: chat, fine-tune, reinforce, and compare with plain transformers."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import openai
import tinker

from fovea_data import FineTuneSettings, TunedModel, fine_tune, load_chats
from fovea_real.lessons import Fact, Sum, environments, facts, pirate_score, says, speaks_like_a_pirate, sums
from fovea_rollout import (
    ChatTemplate,
    LoopSettings,
    Message,
    RolloutSettings,
    SamplingSettings,
    StepReport,
    TinkerPolicy,
    evaluate,
    train,
)

LONGEST_ANSWER, LONGEST_SUM = 40, 14
"""The most tokens of an answer to a question, and of one to a sum."""
OWN_QUESTIONS = ("What is your name?", "What colour is the sky?", "Name a fruit that is yellow.")
"""Questions of other kinds than those of the fine-tune, for the page."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Server:
    """A running Tinker server.

    Attributes:
        base_url: Its address.
        api_key: The key.
        model: The name of the base model.
    """

    base_url: str
    api_key: str
    model: str


@dataclass(frozen=True)
class Reinforcement:
    """Settings of reinforcement learning.

    Attributes:
        steps: Number of steps.
        groups: Sums of a step, with eight samples each.
        learning_rate: Rate of the first step, three times the default's mean, because 12 steps must suffice.
    """

    steps: int = 12
    groups: int = 4
    learning_rate: float = 1e-3


@dataclass
class Told:
    """The results of the fine-tune.

    Attributes:
        held_out: The held-out facts.
        first, last: The answers to them before and after.
        own_first, own_last: The answers to `OWN_QUESTIONS` before and after.
        losses: Mean loss of an answer's token, by step, in nats.
        equal: The number of held-out answers in which transformers agrees with Fovea in every token.
    """

    held_out: list[Fact]
    first: list[str] = field(default_factory=list)
    last: list[str] = field(default_factory=list)
    own_first: list[str] = field(default_factory=list)
    own_last: list[str] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    equal: int = 0

    def style(self, answers: Sequence[str]) -> float:
        """Returns the share of answers in the style of a pirate."""
        return sum(map(speaks_like_a_pirate, answers)) / len(answers)

    def right(self, answers: Sequence[str]) -> float:
        """Returns the share of answers that contain the right word."""
        return sum(says(answer, fact.word) for answer, fact in zip(answers, self.held_out, strict=True)) / len(answers)


@dataclass
class Reinforced:
    """The results of reinforcement learning for one seed.

    Attributes:
        seed: The seed of adapter, split and order.
        held_out: The held-out sums.
        first, last: The greedy answers to them before and after.
        rewards: Mean reward of a step's samples at temperature 1.
        seconds: Duration of the steps.
    """

    seed: int
    held_out: list[Sum]
    first: list[str] = field(default_factory=list)
    last: list[str] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def score(self, answers: Sequence[str]) -> float:
        """Returns the share of answers with the right result in a box."""
        return sum(one.is_right(answer) for one, answer in zip(self.held_out, answers, strict=True)) / len(answers)


def chat(server: Server, model: str, questions: Sequence[str]) -> list[str]:
    """Returns greedy answers of a model or checkpoint over `/v1`, through OpenAI's client."""
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key=server.api_key, max_retries=0) as client:
        return [
            str(
                client.chat.completions.create(
                    model=model,
                    messages=[{"role": "user", "content": question}],
                    max_completion_tokens=LONGEST_ANSWER,
                    temperature=0.0,
                )
                .choices[0]
                .message.content
            )
            for question in questions
        ]


def teach(server: Server, folder: pathlib.Path, seed: int, epochs: int, say: Say) -> Told:
    """Fine-tunes the model to tell facts like a pirate, merges it, and compares transformers' answers with Fovea's."""
    learnt, held_out = facts(seed)
    told = Told(held_out)
    questions = [fact.question for fact in held_out]
    with timed("chat before, over /v1", say):
        told.first = chat(server, server.model, questions)
        told.own_first = chat(server, server.model, OWN_QUESTIONS)
    rows, held_out_rows = (load_chats([fact.row for fact in some]) for some in (learnt, held_out))
    settings = FineTuneSettings(epochs=epochs, batch_size=8, evaluate_every=epochs * len(learnt), seed=seed)
    with timed(f"fine-tune on {len(learnt)} facts, {epochs} times", say):
        tuned = fine_tune(
            rows,
            held_out_rows,
            settings,
            out=folder / "fine-tune",
            model=server.model,
            base_url=server.base_url,
            api_key=server.api_key,
            score=pirate_score,
            progress=False,
        )
    with tuned:
        told.losses = tuned.losses
        with timed("chat after, over /v1", say):
            told.last = chat(server, tuned.weights, questions)
            told.own_last = chat(server, tuned.weights, OWN_QUESTIONS)
        with timed("ask through the Tinker API, and merge", say):
            prompts, sampled = _sampled(tuned, questions)
            tuned.export(folder / "merged", merged=True)
    with timed("ask transformers", say):
        told.equal = sum(map(_equal, sampled, _generated(folder / "merged", prompts)))
    return told


def _equal(one: list[int], other: list[int]) -> bool:
    return one == other


def _sampled(tuned: TunedModel, questions: Sequence[str]) -> tuple[list[list[int]], list[list[int]]]:
    """Returns the tokens of each prompt, and those of the tuned model's greedy answer to it."""
    assert tuned.sampling is not None
    encoder = tuned.connection.encoder
    prompts = [encoder.prompt([Message("user", (question,))]) for question in questions]
    params = tinker.SamplingParams(max_tokens=LONGEST_ANSWER, temperature=0.0)
    pending = [tuned.sampling.sample(prompt, 1, params) for prompt in prompts]
    return [prompt.to_ints() for prompt in prompts], [list(one.result().sequences[0].tokens) for one in pending]


def _generated(model: pathlib.Path, prompts: Sequence[list[int]]) -> list[list[int]]:
    """Returns the tokens that plain transformers generates greedily from a checkpoint folder."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval()
    answers = []
    for prompt in prompts:
        with torch.no_grad():
            made = loaded.generate(torch.tensor([prompt]), max_new_tokens=LONGEST_ANSWER, do_sample=False)
        answers.append(made[0, len(prompt) :].tolist())
    return answers


async def reinforce(server: Server, seed: int, recipe: Reinforcement, say: Say) -> Reinforced:
    """Teaches the model to add by reinforcement: it samples, and only right results in a box are rewarded."""
    practised, held_out = sums(seed)
    found = Reinforced(seed, held_out)
    service = tinker.ServiceClient(base_url=server.base_url, api_key=server.api_key)
    client = await service.create_lora_training_client(base_model=server.model, rank=16, seed=seed, train_unembed=False)
    template = ChatTemplate(client.get_tokenizer())
    rollout = RolloutSettings(SamplingSettings(max_tokens=LONGEST_SUM, seed=seed), max_turns=1)
    settings = LoopSettings(
        recipe.steps,
        groups_per_step=recipe.groups,
        learning_rate=recipe.learning_rate,
        filter_groups=True,  # most groups are all wrong at first, and all right in the end
        target_kl=0.03,
        kl_coefficient=0.0,  # a short answer has no form to lose, and scoring by the base model costs a third
        rollout=rollout,
        seed=seed,
    )

    async def answers(policy: Any, moment: str) -> list[str]:
        played = await evaluate(policy, template, environments(held_out), settings.greedy, name=moment)
        if played.failures:
            raise RuntimeError(f"{moment}: {len(played.failures)} sums failed, the first: {played.failures[0]}")
        return [one.turns[0].answer.text for one in played.trajectories]

    def on_step(report: StepReport) -> None:
        found.rewards.append(report.reward_mean)
        parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in report.seconds.items())
        say(f"step {report.step:3}  reward {report.reward_mean:.2f}, boxed {report.metrics['boxed']:.2f}; {parts}")

    found.first = await answers(TinkerPolicy(await client.save_weights_and_get_sampling_client()), "before")
    say(f"seed {seed}, held-out sums before: {found.score(found.first):.2f}")
    begun = time.monotonic()
    policy = await train(client, template, environments(practised), settings, on_step, progress=False)
    found.seconds = time.monotonic() - begun
    found.last = await answers(policy, "after")
    say(f"seed {seed}, held-out sums after: {found.score(found.last):.2f}")
    return found


@contextmanager
def timed(step: str, say: Say) -> Iterator[None]:
    """Prints the duration of a step."""
    begun = time.monotonic()
    yield
    say(f"{time.monotonic() - begun:7.1f} s  {step}")
