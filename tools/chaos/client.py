"""A client that trains and samples text and images through the official SDK. Its name determines all that it does.

`python -m chaos.client --base-url URL --model NAME --name NAME --history FILE --stop FILE`.
"""

import argparse
import io
import itertools
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TypeVar, cast

if __name__ == "__main__":
    # The SDK imports torch if it is installed, which takes most of the start, and nothing here needs it.
    sys.modules["torch"] = cast(ModuleType, None)

import numpy as np
import tinker
from PIL import Image

from chaos.history import Recorder, digest

LEARNING_RATE = 2e-2
"""Learning rate, so large that all snapshots are clearly different."""
VOCABULARY = 200
IMAGE_SIZE = (224, 224)
IMAGE_TOKENS = 64  # patches of 16 x 16, merged 2 x 2
SNAPSHOT_EACH, SAVE_EACH, LOAD_EACH = 4, 6, 12
"""Number of rounds between two such operations."""
LONGEST_S = 900.0
"""Timeout in seconds, longer than any answer should take. Then the client gives up, and the checker reports it."""

Result = TypeVar("Result", covariant=True)


class Future(Protocol[Result]):
    """The interface that all futures of the SDK share."""

    def result(self, timeout: float | None = None) -> Result:
        """Waits for the answer and returns it."""


class Client:
    """A client with its own model. It sends each round before the previous one is answered."""

    def __init__(self, service: tinker.ServiceClient, base_model: str, name: str, recorder: Recorder) -> None:
        self._service = service
        self._base_model = base_model
        self._name = name
        self._recorder = recorder
        self._samples = "samples" in name  # such clients stop while there is no sampler
        self._random = random.Random(name)
        self._waiting: list[tuple[int, Future[Any], Callable[[Any], dict[str, Any]]]] = []
        self._samplers: list[tuple[int, tinker.SamplingClient]] = []
        self._saved: list[str] = []
        self._probe = tinker.ModelInput.from_ints([self._random.randrange(VOCABULARY) for _ in range(24)])
        number = recorder.invoked("create_model")
        creating = service.create_lora_training_client(
            base_model=base_model, rank=4, seed=self._random.randrange(2**31)
        )
        self._training = self._answer(number, creating, lambda training: {"model_id": training.model_id})

    def round(self, number: int) -> None:
        """Sends two batches and a step; in some rounds also samples from new and old weights, saves a state or loads
        one.
        """
        before, self._waiting = self._waiting, []
        try:
            self._begin(number)
        finally:
            self._wait(before)

    def _begin(self, number: int) -> None:
        for _ in range(2):
            data = [self._datum() for _ in range(self._random.randint(1, 3))]
            self._send(
                "forward_backward", self._training.forward_backward(data, "cross_entropy"), _losses, round=number
            )
        adam = tinker.AdamParams(learning_rate=LEARNING_RATE)
        self._send("optim_step", self._training.optim_step(adam), _metrics, round=number)
        if self._samples and number % SNAPSHOT_EACH == 1:
            self._take_snapshot(number)
        if self._samplers:
            self._sample(number)
        if number % SAVE_EACH == 2:
            self.save(f"round-{number}", number)
        if number % LOAD_EACH == 9:
            path = self._random.choice(self._saved)
            loading = self._training.load_state_with_optimizer(path)
            self._send("load_state", loading, lambda _: {}, round=number)

    def save(self, name: str, number: int) -> None:
        """Saves weights and optimizer moments after all earlier commands are answered."""
        self.finish()
        command = self._recorder.invoked("save_state", round=number, name=name)
        path = self._answer(command, self._training.save_state(name), lambda saved: {"path": saved.path}).path
        self._saved.append(path)

    def end(self, number: int) -> None:
        """Saves, and samples from the current weights.

        After a restart, services open some resources on first use, such as the port for weight pushes. This makes sure
        that all of them are open before the inventory.
        """
        self.save("final", number)
        if self._samples:
            command = self._recorder.invoked("snapshot", round=number)
            sampler = self._answer(command, self._training.save_weights_and_get_sampling_client(), lambda _: {})
            self._samplers = [(number, sampler)]
            self._sample(number)

    def finish(self) -> None:
        """Waits for all answers."""
        waiting, self._waiting = self._waiting, []
        self._wait(waiting)

    def _take_snapshot(self, number: int) -> None:
        command = self._recorder.invoked("snapshot", round=number)
        sampler = self._answer(command, self._training.save_weights_and_get_sampling_client(), lambda _: {})
        self._samplers.append((number, sampler))
        score = sampler.compute_logprobs(self._probe)
        self._send("score", score, lambda logprobs: {"logprobs": logprobs[1:]}, round=number, snapshot=number)

    def _sample(self, number: int) -> None:
        """Samples from the newest or earlier weights, with or without an image in the prompt."""
        snapshot, sampler = self._random.choice(self._samplers[-2:])
        greedy = tinker.SamplingParams(max_tokens=8, temperature=0.0, seed=number)
        sampling = sampler.sample(self._datum().model_input, num_samples=1, sampling_params=greedy)
        self._send("sample", sampling, _sequence, round=number, snapshot=snapshot)

    def _send(
        self, operation: str, future: Future[Any], told: Callable[[Any], dict[str, Any]], **arguments: Any
    ) -> None:
        self._waiting.append((self._recorder.invoked(operation, **arguments), future, told))

    def _wait(self, waiting: list[tuple[int, Future[Any], Callable[[Any], dict[str, Any]]]]) -> None:
        """Waits for several futures at once, so that each answer is recorded at the time it arrives."""
        with ThreadPoolExecutor(max_workers=max(len(waiting), 1)) as pool:
            answers = [pool.submit(self._answer, number, future, told) for number, future, told in waiting]
            for answer in answers:
                answer.result()

    def _answer(self, number: int, future: Future[Result], told: Callable[[Result], dict[str, Any]]) -> Result:
        """Waits for a future and records its answer or error."""
        try:
            value = future.result(timeout=LONGEST_S)
        except Exception as error:
            self._recorder.failed(number, f"{type(error).__name__}: {error}")
            raise
        self._recorder.answered(number, **told(value))
        return value

    def _datum(self) -> tinker.Datum:
        """Returns tokens, one time in three around an image. Every position is scored."""
        tokens = [self._random.randrange(VOCABULARY) for _ in range(self._random.randint(8, 40))]
        chunks: list[Any] = [tinker.EncodedTextChunk(tokens=tokens)]
        if self._random.random() < 1 / 3:
            data = _picture(self._random.randrange(2**31))
            chunks.append(tinker.types.ImageChunk(data=data, format="png", expected_tokens=IMAGE_TOKENS))
            chunks.append(tinker.EncodedTextChunk(tokens=tokens[:8]))
        model_input = tinker.ModelInput(chunks=chunks)
        length = model_input.length
        targets = [self._random.randrange(VOCABULARY) for _ in range(length)]
        return tinker.Datum(
            model_input=model_input,
            loss_fn_inputs={
                "target_tokens": tinker.TensorData(data=targets, dtype="int64", shape=[length]),
                "weights": tinker.TensorData(data=[1.0] * length, dtype="float32", shape=[length]),
            },
        )


def _picture(seed: int) -> bytes:
    noise = np.random.default_rng(seed).integers(0, 255, (8, 8, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).resize(IMAGE_SIZE, Image.Resampling.BICUBIC).save(buffer, "PNG")
    return buffer.getvalue()


def _losses(output: tinker.ForwardBackwardOutput) -> dict[str, Any]:
    tensors = [{name: tensor.tolist() for name, tensor in one.items()} for one in output.loss_fn_outputs]
    return {"loss": output.metrics["loss:sum"], "digest": digest([tensors, output.metrics["loss:sum"]])}


def _metrics(output: tinker.OptimStepResponse) -> dict[str, Any]:
    return {"metrics": output.metrics or {}}


def _sequence(output: tinker.SampleResponse) -> dict[str, Any]:
    (sequence,) = output.sequences
    return {"tokens": list(sequence.tokens), "logprobs": list(sequence.logprobs or [])}


def _rounds(given: int | None, stop: Path) -> Iterator[int]:
    """Yields round numbers up to a given count, or until a file appears."""
    for number in itertools.count():
        if number == given or (given is None and stop.exists()):
            return
        yield number


def train(
    service: tinker.ServiceClient,
    base_model: str,
    name: str,
    recorder: Recorder,
    rounds: Iterable[int],
    pause_s: float = 0.0,
) -> None:
    """Runs a client from its first command to its last. If one fails, the answers of earlier commands are still
    recorded.

    Args:
        service: Client of the SDK.
        base_model: Name of the base model.
        name: Name of the client, which determines its commands.
        recorder: Receives commands and answers.
        rounds: Numbers of the rounds.
        pause_s: Seconds between rounds.
    """
    client = Client(service, base_model, name, recorder)
    number = -1
    try:
        for number in rounds:
            client.round(number)
            time.sleep(pause_s)
        client.end(number)
    finally:
        client.finish()


def main() -> None:
    """Trains until stopped, saves, and ends the session."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--history", type=Path, required=True)
    parser.add_argument(
        "--stop", type=Path, required=True, help="File that ends the client after its current round once it exists."
    )
    parser.add_argument("--rounds", type=int, help="Number of rounds; --stop is then ignored.")
    parser.add_argument("--pause-s", type=float, default=0.0, help="Between rounds.")
    given = parser.parse_args()
    with (
        given.history.open("w") as file,
        tinker.ServiceClient(base_url=given.base_url, api_key="tml-local") as service,
    ):
        rounds = _rounds(given.rounds, given.stop)
        train(service, given.model, given.name, Recorder(file, given.name), rounds, given.pause_s)


if __name__ == "__main__":
    main()
