"""Tries a model of your own: trains ten steps on pictures, or on sums if it takes no pictures, and compares sampler and
trainer.

`python -m examples.first_model --model NAME_OR_DIR` downloads the model if needed, starts a Fovea server, and reports
what works and what does not. Exit status: 0 if all is good, 1 if something is wrong, 2 if the model could not be tried.
"""

from __future__ import annotations

import argparse
import io
import os
import pathlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
import numpy.typing as npt
import tinker
from PIL import Image
from tinker.types import ImageChunk

from examples.download import CannotTry, checkpoint
from fovea.wire.errors import FoveaError, InvalidInput
from fovea_demo.digits import QUESTION, load_scans
from fovea_demo.up import NotReady, running_fovea
from fovea_rollout import ChatTemplate, Message, Picture, connect
from fovea_rollout.messages import Part

API_KEY = "tml-local"
Seen = Literal["pictures", "texts"]
SIDE = 112
"""Pixels of a picture's side. The scans have 8, fewer than a patch of most models."""
ASKED = 16
ANSWER_TOKENS = 16
WAIT_S = 600.0
READY_S = 1800.0
"""Seconds until the server must be ready, long enough to read a large model from a slow disk."""
MOST_KL = 0.01
"""The largest KL in nat. In bfloat16 working models stay below it. If sampler and trainer differ, it is far above."""
LEAST_CHANGE = 1e-4
"""The smallest mean change of the answers' log-probabilities with another picture or text, in nat."""


@dataclass(frozen=True)
class Agreement:
    """The agreement of the sampler's and the trainer's log-probabilities of the sampled tokens, in nat.

    Attributes:
        most: The largest difference.
        kl: KL of the sampler from the trainer, estimated as the mean of exp(d) - 1 - d over all tokens, where d is the
            trainer's log-probability minus the sampler's (Schulman, 2020).
        change: Mean change of the trainer's log-probabilities with the picture or text of the next question.
    """

    most: float
    kl: float
    change: float

    def problems(self, when: str, seen: Seen = "pictures") -> Iterator[str]:
        """Yields the problems of a model that answers questions about pictures, or of a text-only model."""
        if not self.kl <= MOST_KL:
            yield f"{when}, sampler and trainer compute the model differently: KL {self.kl:.1e}, at most {MOST_KL}"
        if not self.change >= LEAST_CHANGE:
            yield f"{when}, other {seen} change nothing ({self.change:.1e} nat): the model sees no {seen}"


@dataclass(frozen=True)
class Lesson:
    """A question, and the text of its answer."""

    parts: tuple[Part, ...]
    answer: str


@cache
def picture_lessons() -> tuple[list[Lesson], list[Lesson]]:
    """Returns scans of digits to train on, and held-out ones."""
    train, held_out = (
        [Lesson((Picture.of_bytes(enlarged(scan.png)), QUESTION), str(scan.digit)) for scan in scans]
        for scans in load_scans()
    )
    return train, held_out


def text_lessons() -> tuple[list[Lesson], list[Lesson]]:
    """Returns sums of numbers from 10 to 49 to train on, and held-out ones."""
    found = [
        Lesson((f"What is {left} + {right}?",), str(left + right)) for left in range(10, 50) for right in range(10, 50)
    ]
    order = np.random.default_rng(0).permutation(len(found))
    return [found[place] for place in order[ASKED:]], [found[place] for place in order[:ASKED]]


class Session:
    """A LoRA of the model, and questions in its own chat format.

    Attributes:
        seen: `pictures` if questions are about pictures; `texts` if the model's chat template accepts none.
    """

    def __init__(self, service: tinker.ServiceClient, model: str, rank: int, learning_rate: float) -> None:
        self.training = service.create_lora_training_client(base_model=model, rank=rank, seed=0).result(WAIT_S)
        self.tokenizer = self.training.get_tokenizer()
        self._template = ChatTemplate(self.tokenizer)
        self._adam = tinker.AdamParams(learning_rate=learning_rate, grad_clip_norm=1.0)
        self.base = service.create_sampling_client(base_model=model).result(WAIT_S)
        lesson = picture_lessons()[0][0]
        try:
            asked = self.question(lesson)
        except InvalidInput as error:
            print(f"text only, because the chat template accepts no pictures: {error}", flush=True)
            self.seen: Seen = "texts"
        else:
            self.seen = "pictures"
            # All pictures have the same size, so all questions have the same length, which the server counts.
            self._pictured_length = len(self.base.compute_logprobs(asked).result(WAIT_S))

    def lessons(self) -> tuple[list[Lesson], list[Lesson]]:
        """Returns lessons to train on, and held-out ones."""
        return picture_lessons() if self.seen == "pictures" else text_lessons()

    def question(self, lesson: Lesson) -> tinker.ModelInput:
        """Returns the prompt. Raises InvalidInput for a picture that the chat template does not accept."""
        chunks = self._template.render([Message("user", lesson.parts)])
        return tinker.ModelInput(
            chunks=[
                ImageChunk(data=chunk.data, format=chunk.format)
                if isinstance(chunk, Picture)
                else tinker.EncodedTextChunk(tokens=list(chunk.ids))
                for chunk in chunks
            ]
        )

    def _length(self, question: tinker.ModelInput) -> int:
        return self._pictured_length if self.seen == "pictures" else question.length

    def step(self, lessons: Sequence[Lesson]) -> float:
        """Trains one batch; returns the loss, in nat for each token of an answer."""
        answers = self._answers(lessons)
        backward = self.training.forward_backward(list(map(self._datum, lessons, answers)), "cross_entropy")
        step = self.training.optim_step(self._adam)
        loss = backward.result(WAIT_S).metrics["loss:sum"] / sum(map(len, answers))
        step.result(WAIT_S)
        return loss

    def loss(self, lessons: Sequence[Lesson]) -> float:
        """Returns the loss of lessons without training on them."""
        return -float(self._scores(lessons, self._answers(lessons)).mean())

    def compare(self, sampling: tinker.SamplingClient, lessons: Sequence[Lesson]) -> Agreement:
        """Samples an answer to each question, and scores its tokens with the trainer."""
        params = tinker.SamplingParams(max_tokens=ANSWER_TOKENS, temperature=1.0, seed=0)
        asked = [sampling.sample(self.question(lesson), num_samples=1, sampling_params=params) for lesson in lessons]
        said = [one.result(WAIT_S).sequences[0] for one in asked]
        answers = [list(one.tokens) for one in said]
        sampled = np.concatenate([one.logprobs for one in said])
        trained, other = self._scores(lessons, answers), self._scores([*lessons[1:], lessons[0]], answers)
        apart = trained - sampled
        kl = float(np.mean(np.exp(apart) - 1 - apart))
        return Agreement(float(np.abs(apart).max()), kl, float(np.abs(other - trained).mean()))

    def _answers(self, lessons: Sequence[Lesson]) -> list[list[int]]:
        end = list(self._template.stop_ids[:1])
        return [[*self.tokenizer.encode(lesson.answer, add_special_tokens=False), *end] for lesson in lessons]

    def _scores(self, lessons: Sequence[Lesson], answers: Sequence[list[int]]) -> npt.NDArray[np.float64]:
        """Returns the trainer's log-probabilities of all tokens of the answers, one after another."""
        data = list(map(self._datum, lessons, answers))
        outputs = self.training.forward(data, "cross_entropy").result(WAIT_S).loss_fn_outputs
        scores = [
            list(output["logprobs"].data)[-len(answer) :] for output, answer in zip(outputs, answers, strict=True)
        ]
        return np.concatenate(scores).astype(np.float64)

    def _datum(self, lesson: Lesson, answer: list[int]) -> tinker.Datum:
        question = self.question(lesson)
        chunks = [*question.chunks]
        if answer[:-1]:  # the last token is only a target
            chunks.append(tinker.EncodedTextChunk(tokens=answer[:-1]))
        before = self._length(question) - 1
        targets, weights = [0] * before + answer, [0.0] * before + [1.0] * len(answer)
        return tinker.Datum(
            model_input=tinker.ModelInput(chunks=chunks),
            loss_fn_inputs={
                "target_tokens": tinker.TensorData(data=targets, dtype="int64", shape=[len(targets)]),
                "weights": tinker.TensorData(data=weights, dtype="float32", shape=[len(weights)]),
            },
        )


def enlarged(png: bytes) -> bytes:
    """Returns the picture with sides of `SIDE` pixels, as a PNG file."""
    buffer = io.BytesIO()
    with Image.open(io.BytesIO(png)) as image:
        image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.NEAREST).save(buffer, "PNG")
    return buffer.getvalue()


def try_out(
    base_url: str, api_key: str | None, model: str | None, steps: int, batch: int, rank: int, rate: float
) -> tuple[Seen, list[str]]:
    """Trains, compares and prints the measurements; returns what the model sees, and the problems."""
    with connect(base_url, api_key) as service:
        if model is None:
            capabilities = tinker.RestClient(base_url=base_url, api_key=api_key).get_server_capabilities().result()
            model = str(capabilities.supported_models[0].model_name)
        session = Session(service, model, rank, rate)
        train, held_out = session.lessons()
        asked = held_out[:ASKED]
        problems = _compared(session, session.base, asked, "before training")
        before = session.loss(asked)
        for number in range(1, steps + 1):
            loss = session.step(train[(number - 1) * batch : number * batch])
            print(f"step {number:3}  loss {loss:.4f} nat", flush=True)
        after = session.loss(asked)
        print(f"{session.seen} that were not trained on: loss {before:.4f} to {after:.4f} nat", flush=True)
        if not after < before:
            problems.append(
                f"the model learns nothing: the loss goes from {before:.4f} to {after:.4f} nat in {steps} steps"
            )
        pushed = session.training.save_weights_and_get_sampling_client().result(WAIT_S)
        return session.seen, problems + _compared(session, pushed, asked, "after training")


def _compared(session: Session, sampling: tinker.SamplingClient, lessons: Sequence[Lesson], when: str) -> list[str]:
    found = session.compare(sampling, lessons)
    print(
        f"{when}: sampler and trainer are apart by at most {found.most:.1e} nat, KL {found.kl:.1e}; "
        f"other {session.seen} change {found.change:.1e} nat",
        flush=True,
    )
    return list(found.problems(when, session.seen))


@contextmanager
def _fovea(model: str) -> Iterator[str]:
    """Starts a Fovea server with a checkpoint; yields its address. Raises CannotTry if it does not start."""
    directory = checkpoint(model)
    print(f"starting Fovea with {directory}, which takes minutes for a large model", flush=True)
    with tempfile.TemporaryDirectory(prefix="fovea-first-") as folder, ExitStack() as stack:
        ports = ("--port", "0", "--grpc-port", "0", "--ranks", "1")
        try:
            state = stack.enter_context(running_fovea(pathlib.Path(folder), directory, *ports, timeout_s=READY_S))
        except NotReady as error:
            raise CannotTry(f"Fovea does not start with {directory}. {error}") from error
        print(f"ready after {state['ready_s']:.0f} s at {state['base_url']}", flush=True)
        yield str(state["base_url"])


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.first_model", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", help="name on the hub, or checkpoint directory; with --base-url, a model of the server"
    )
    parser.add_argument("--base-url", help="address of a running Tinker server; the default model is its first")
    parser.add_argument("--steps", type=int, default=10, help="training steps (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="pictures, or texts, of each step (default: %(default)s)")
    parser.add_argument(
        "--rank", type=int, default=16, help="rank of the LoRA; 0 trains all parameters (default: %(default)s)"
    )
    parser.add_argument("--learning-rate", type=float, default=5e-4, help="learning rate (default: %(default)s)")
    arguments = parser.parse_args()
    if not (arguments.model or arguments.base_url):
        parser.error("give --model, --base-url, or both")
    if arguments.steps < 1:
        parser.error("--steps must be at least 1")
    os.environ.setdefault("TINKER_TELEMETRY", "0")  # without this the SDK would send telemetry to this server
    key = os.environ.get("TINKER_API_KEY", API_KEY)
    recipe = (arguments.steps, arguments.batch, arguments.rank, arguments.learning_rate)
    try:
        if arguments.base_url:
            known = tinker.auth.tinker_has_credentials()  # a person may sign in without a key
            seen, problems = try_out(arguments.base_url, None if known else key, arguments.model, *recipe)
        else:
            with _fovea(arguments.model) as base_url:
                seen, problems = try_out(base_url, key, None, *recipe)
    except (CannotTry, FoveaError, tinker.TinkerError) as error:
        print(f"could not be tried: {error}", file=sys.stderr)
        return 2
    return judge(problems, seen)


def judge(problems: Sequence[str], seen: Seen = "pictures") -> int:
    """Prints the problems, or that all is good; returns the exit status."""
    for problem in problems:
        print(f"WRONG: {problem}")
    if not problems:
        print(f"GOOD: it learns, it sees its {seen}, and sampler and trainer agree before and after training")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
