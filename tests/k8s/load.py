"""Samples images continuously from several clients, and records every answer and failure."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import tinker
from transformers import AutoTokenizer

import fovea_tinyvlm
from benchmarks.running import metric_total
from tests.e2e.prompts import Prompt, PromptBuilder, picture
from tests.k8s.cluster import WAIT_S, wait_for

_WORKERS = 18
"""Enough load that prompts leave the sampler that has them cached, which the gateway prefers while it is not busier."""
_PATIENCE_S = 300.0

Tokens = tuple[int, ...]


class Load:
    """Clients that sample prompts in turn, at temperature 0.

    Attributes:
        answers: The prompt's number and the tokens of every answer.
        failures: The exceptions of requests without an answer.
    """

    def __init__(self, client: tinker.SamplingClient, prompts: Sequence[tinker.ModelInput]) -> None:
        self._client, self._prompts = client, prompts
        self._numbers = itertools.count()
        self._stop = threading.Event()
        self.answers: list[tuple[int, Tokens]] = []
        self.failures: list[Exception] = []

    @contextmanager
    def running(self) -> Iterator[Load]:
        """Runs the load; waits for the answers in progress at the end."""
        workers = [threading.Thread(target=self._work, daemon=True) for _ in range(_WORKERS)]
        for worker in workers:
            worker.start()
        try:
            yield self
        finally:
            self._stop.set()
            for worker in workers:
                worker.join(_PATIENCE_S)
        assert not any(worker.is_alive() for worker in workers), "a request hangs"

    def wait(self, count: int) -> None:
        """Waits for a number of further answers."""
        until = len(self.answers) + count
        deadline = time.monotonic() + _PATIENCE_S
        while len(self.answers) < until:
            assert not self.failures, self.failures
            assert time.monotonic() < deadline, f"{until - len(self.answers)} of {count} answers did not come"
            time.sleep(0.05)

    def _work(self) -> None:
        while not self._stop.is_set():
            number = next(self._numbers) % len(self._prompts)
            try:
                self.answers.append((number, greedy(self._client, self._prompts[number])))
            except Exception as error:
                self.failures.append(error)
                return


def image_prompts(count: int) -> list[Prompt]:
    """Returns prompts with one image each. They share no prefix, so that no cache binds them to one sampler."""
    builder = PromptBuilder(AutoTokenizer.from_pretrained(fovea_tinyvlm.ensure()))
    return [
        builder.build(f"{number}. <|vision_start|>", (picture(224, 224, number), 64), "<|vision_end|>What is this? ")
        for number in range(count)
    ]


def wait_for_samplers(count: int, gateway_metrics: str, timeout_s: float = WAIT_S) -> None:
    """Waits until the gateway's metrics show exactly this number of samplers."""

    def replicas(state: str) -> float:
        return metric_total(gateway_metrics, "fovea_gateway_replicas", service="sampler", state=state)

    wait_for(f"{count} samplers", lambda: (replicas("known"), replicas("up")) == (count, count), timeout_s)


def greedy(client: tinker.SamplingClient, prompt: tinker.ModelInput) -> Tokens:
    """Returns a short answer at temperature 0."""
    parameters = tinker.SamplingParams(max_tokens=5, temperature=0.0)
    return tuple(client.sample(prompt, 1, parameters).result().sequences[0].tokens)
