"""Measures pushes of all parameters under answers in flight: `python -m benchmarks.inflight_push MODEL --out FOLDER`.

Starts a Fovea, trains all parameters, and samples long answers that follow the model. Meanwhile it takes steps, each
with an inflight save. Prints the pause of each push, the longest gap in each answer (the pause and, with
`--cache recompute`, the prefill after it), the answers that were lost, and the versions of each answer. Every version
is also saved with a name; in the end each scores all answers. The difference of a token's log-probability from the
score by the version that the sampler states must be small (`inflight_push.own`), from that by others not
(`inflight_push.other`). With `--cache keep` the former includes the effect of the earlier keys and values.
"""

import argparse
import asyncio
import contextlib
import operator
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from benchmarks.figure import emit
from benchmarks.push import PAUSE
from benchmarks.running import Running
from benchmarks.sampled_support import text_input
from fovea.api.v1 import gateway_pb2, sampler_pb2, trainer_pb2, weights_pb2
from fovea.client import GatewayClient
from fovea.wire import tensors
from fovea.wire.errors import FoveaError
from fovea_demo.up import running_fovea

_PROMPT_TOKENS = 32
_HEARTBEAT_S = 5.0
_API_KEY = "tml-local"


@dataclass
class Answer:
    """One answer: its prompt, its tokens with log-probabilities and snapshots, and the times of their arrival."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    makers: list[str] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def longest_gap_s(self) -> float:
        """The longest time between two events of the stream."""
        return max(map(operator.sub, self.arrivals[1:], self.arrivals), default=0.0)


class Run:
    """A model of all parameters, and its commands in order."""

    def __init__(self, client: GatewayClient, session_id: str, model_id: str, rate: float) -> None:
        self._client, self._session_id, self._model_id, self._rate = client, session_id, model_id, rate
        self._seq_id = 0
        self.named: dict[str, str] = {}
        """Paths of the named saves, by the id of the inflight save of the same weights."""

    @classmethod
    async def create(cls, client: GatewayClient, rate: float) -> "Run":
        """Creates the model."""
        base = next(model.name for model in await client.capabilities() if model.is_trained)
        session_id = await client.create_session()
        model_id = await client.create_model(session_id, 0, base, weights_pb2.LoraConfig(rank=0))
        return cls(client, session_id, model_id, rate)

    @contextlib.asynccontextmanager
    async def alive(self) -> AsyncIterator[None]:
        """Keeps the session open for the duration of the block, and ends it."""

        async def beat() -> None:
            while True:
                await self._client.heartbeat(self._session_id)
                await asyncio.sleep(_HEARTBEAT_S)

        beating = asyncio.create_task(beat())
        try:
            yield
        finally:
            beating.cancel()
            await self._client.finish_session(self._session_id)

    async def step(self) -> str:
        """Takes a step and saves the weights, with a name and in flight; returns the session of the latter."""
        number = len(self.named)
        tokens = np.random.default_rng(number).integers(10, 900, 64)
        inputs = {"target_tokens": tensors.encode(tokens[1:].astype(np.int64))}
        header = gateway_pb2.SubmitForwardBackwardHeader(
            model_id=self._model_id, seq_id=self._next(), loss_function="cross_entropy", backward=True
        )
        datum = gateway_pb2.InputDatum(input=text_input(tokens[:-1].tolist()), loss_inputs=inputs)
        await self._client.forward_backward(header, [datum])
        adam = trainer_pb2.AdamParams(learning_rate=self._rate, beta1=0.9, beta2=0.95, eps=1e-8)
        await self._client.optim_step(self._model_id, self._next(), adam)
        path = (await self._client.save_for_sampler(self._model_id, self._next(), f"version-{number}")).path
        saved = await self._client.save_for_sampler(self._model_id, self._next(), inflight=True)
        self.named[saved.snapshot.snapshot_id] = path
        return saved.sampling_session_id

    async def scores(self, path: str, answers: list[Answer]) -> list[npt.NDArray[np.float32]]:
        """Returns the log-probabilities of the answers' tokens under named weights."""
        number = list(self.named.values()).index(path)
        session = await self._client.create_sampling_session(self._session_id, number, model_path=path)
        return await asyncio.gather(*(self._score(session, answer) for answer in answers))

    async def _score(self, session: str, answer: Answer) -> npt.NDArray[np.float32]:
        request = gateway_pb2.SampleTokensRequest(
            sampling_session_id=session,
            prompt=text_input([*answer.prompt, *answer.tokens]),
            sample_count=1,
            prompt_logprobs=True,
            params=sampler_pb2.SamplingParams(max_tokens=1),
        )
        events = [event async for event in self._client.sample(request)]
        found: npt.NDArray[np.float32] = tensors.decode_floats(
            next(event.prompt.logprobs for event in events if event.WhichOneof("event") == "prompt")
        )
        return found[len(answer.prompt) :]

    def _next(self) -> int:
        self._seq_id += 1
        return self._seq_id


async def draw(
    client: GatewayClient,
    session: str,
    number: int,
    count: int,
    answer: Answer,
    is_enough: Callable[[Answer], bool] = lambda _: False,
) -> None:
    """Samples an answer of `count` tokens, or until it is enough; notes the error if it is lost."""
    request = gateway_pb2.SampleTokensRequest(
        sampling_session_id=session,
        prompt=text_input(answer.prompt),
        sample_count=1,
        params=sampler_pb2.SamplingParams(
            max_tokens=count, seed=number, stop=sampler_pb2.StopCondition(ignore_eos=True)
        ),
    )
    try:
        async with contextlib.aclosing(cast(Any, client.sample(request))) as events:
            async for event in events:
                if event.WhichOneof("event") == "delta":
                    ids = tensors.decode_tokens(event.delta.tokens).tolist()
                    answer.tokens += ids
                    answer.logprobs += tensors.decode_floats(event.delta.logprobs).tolist()
                    answer.makers += [event.delta.snapshot_id] * len(ids)
                    answer.arrivals.append(time.perf_counter())
                if is_enough(answer):
                    break
    except FoveaError as error:
        answer.error = f"{error.reason}: {error.message}"


async def measure(client: GatewayClient, running: Running, options: argparse.Namespace) -> None:
    """Prints the figures."""
    run = await Run.create(client, options.rate)
    sizes = {"model": Path(options.model).name, "answers": options.answers, "tokens": options.tokens}
    sizes |= {"cache": options.cache, "device": options.device}
    rng = np.random.default_rng(0)
    answers = [Answer(rng.integers(10, 900, _PROMPT_TOKENS).tolist()) for _ in range(options.answers)]
    async with run.alive():
        session = await run.step()
        drawing = [
            asyncio.create_task(draw(client, session, number, options.tokens, answer))
            for number, answer in enumerate(answers)
        ]
        pauses, seconds = await push_under(run, running, answers, drawing, options)
        await asyncio.gather(*drawing)
        lost = [answer for answer in answers if answer.error or len(answer.tokens) != options.tokens]
        own, other = await differences(run, [answer for answer in answers if answer not in lost])
    emit("inflight_push.pause", pauses or [float("nan")], "s", **sizes)
    emit("inflight_push.seconds", seconds or [float("nan")], "s", **sizes)
    emit("inflight_push.gap", [answer.longest_gap_s for answer in answers], "s", **sizes)
    emit("inflight_push.lost", [len(lost)], "answers", **sizes, errors=[answer.error for answer in lost])
    versions = [len(set(answer.makers)) for answer in answers]
    emit("inflight_push.versions", versions, "versions of an answer", **sizes, pushes=len(pauses))
    # Tokens of probability 1 are alike under all weights and show no version.
    surprise = round(-float(np.mean([logprob for answer in answers for logprob in answer.logprobs])), 4)
    for name, found in (("own", own), ("other", other)):
        facts: dict[str, Any] = {"largest": float(found.max(initial=0.0)), "sampled_nats": surprise}
        emit(f"inflight_push.{name}", [float(found.mean())], "nat", **sizes, **facts)


async def push_under(
    run: Run,
    running: Running,
    answers: list[Answer],
    drawing: list[asyncio.Task[None]],
    options: argparse.Namespace,
) -> tuple[list[float], list[float]]:
    """Pushes while answers are drawn; returns the pauses and the seconds from the start of the save to the new weights.

    The pushes are spread over the answers' length.
    """
    pauses, seconds = list[float](), list[float]()
    for number in range(options.pushes):
        reached = options.tokens * (number + 1) // (options.pushes + 1)
        await until(partial(_reach, answers, reached), drawing)
        if all(one.done() for one in drawing):
            break
        paused, begun = running.total("sampler", PAUSE), time.perf_counter()
        await run.step()
        await until(partial(_has_paused, running, paused), drawing)
        if (pause := running.total("sampler", PAUSE) - paused) > 0:  # otherwise the answers ended before
            pauses.append(pause)
            seconds.append(time.perf_counter() - begun)
    return pauses, seconds


def _reach(answers: list[Answer], count: int) -> bool:
    return max(len(answer.tokens) for answer in answers) >= count


def _has_paused(running: Running, before: float) -> bool:
    return running.total("sampler", PAUSE) > before


async def until(holds: Callable[[], bool], drawing: list[asyncio.Task[None]]) -> None:
    """Waits until a condition holds or all answers have ended."""
    while not holds() and not all(one.done() for one in drawing):  # noqa: ASYNC110 - metrics are polled
        await asyncio.sleep(0.05)


async def differences(run: Run, answers: list[Answer]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Returns the differences of all tokens' log-probabilities from the scores of their own version, and of others."""
    own, other = [np.zeros(0, np.float32)], [np.zeros(0, np.float32)]
    for name, path in run.named.items():
        for answer, scores in zip(answers, await run.scores(path, answers), strict=True):
            found = np.abs(scores - np.asarray(answer.logprobs, np.float32))
            is_own = np.asarray(answer.makers) == name
            own.append(found[is_own])
            other.append(found[~is_own])
    return np.concatenate(own), np.concatenate(other)


async def _run(options: argparse.Namespace) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    arguments = ["--port", "0", "--grpc-port", "0", "--set", f"sampler.inflight_cache={options.cache}"]
    arguments += ["--gpus", "none"] if options.device == "cpu" else []
    with running_fovea(options.out / "fovea", Path(options.model), *arguments, *options.up, timeout_s=900):
        running = Running.read(options.out / "fovea" / "up.json")
        async with GatewayClient(running.addresses["gateway"], _API_KEY) as client:
            await measure(client, running, options)


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of the checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="folder of the Fovea's state and checkpoints")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--answers", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=8000, help="tokens of each answer")
    parser.add_argument("--pushes", type=int, default=3)
    parser.add_argument("--cache", choices=["recompute", "keep"], default="recompute")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate; versions must differ measurably")
    parser.add_argument("--up", nargs="*", default=[], help="further options of `fovea up`")
    asyncio.run(_run(parser.parse_args()))


if __name__ == "__main__":
    main()
