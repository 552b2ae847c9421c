"""Compares the sample that a client printed with the same sample in Python."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from examples.clients.question import Question
from fovea.api.v1 import gateway_pb2, sampler_pb2
from fovea.api.v1.model_input_pb2 import IMAGE_FORMAT_PNG, Chunk, ImageChunk, ModelInput, TokenChunk
from fovea.client import GatewayClient
from fovea.wire.tensors import decode_floats, decode_tokens, encode_tokens

TOLERANCE = 1e-5
"""Tolerance of log-probabilities, which clients print with six decimals."""


@dataclass(frozen=True)
class Answer:
    """A sampled sequence.

    Attributes:
        tokens: Ids of the tokens.
        logprobs: Log-probability of each token.
        finish_reason: Name of the enum's value.
    """

    tokens: list[int]
    logprobs: list[float]
    finish_reason: str

    @classmethod
    def parse(cls, printed: str) -> Answer:
        """Parses a client's output. Raises ValueError if a line is malformed."""
        *lines, last = printed.splitlines()
        pairs = [line.split(" ") for line in lines]
        count, reason = last.split(" tokens, ")
        if int(count) != len(pairs):
            raise ValueError(f"{len(pairs)} tokens were printed, but the last line says {last!r}")
        return cls([int(token) for token, _ in pairs], [float(logprob) for _, logprob in pairs], reason)

    def difference(self, wanted: Answer) -> str:
        """Describes the difference from the expected answer; empty if they are the same."""
        if (self.tokens, self.finish_reason) != (wanted.tokens, wanted.finish_reason):
            return f"{self.tokens}, {self.finish_reason}; wanted {wanted.tokens}, {wanted.finish_reason}"
        gaps = [abs(one - two) for one, two in zip(self.logprobs, wanted.logprobs, strict=True)]
        worst = max(gaps, default=0.0)
        return f"log-probabilities differ by {worst:.1e}" if worst > TOLERANCE else ""


def answer(command: Sequence[str], address: str, api_key: str, question: Question, timeout_s: float) -> Answer:
    """Runs a client. Raises subprocess.CalledProcessError, with its standard error, if it fails."""
    options = ["--address", address, "--api-key", api_key, "--timeout", str(timeout_s)]
    done = subprocess.run([*command, *options, *question.arguments()], capture_output=True, text=True, check=True)
    return Answer.parse(done.stdout)


async def answer_in_python(address: str, api_key: str, question: Question, timeout_s: float) -> Answer:
    """Returns the answer that every client should print."""
    before, after = (Chunk(tokens=TokenChunk(tokens=encode_tokens(ids))) for ids in (question.before, question.after))
    image = Chunk(image=ImageChunk(data=question.image.read_bytes(), format=IMAGE_FORMAT_PNG))
    tokens: list[int] = []
    logprobs: list[float] = []
    reason = sampler_pb2.FINISH_REASON_UNSPECIFIED
    async with GatewayClient(address, api_key) as client:
        session = await client.create_session()
        model = (await client.capabilities())[0].name
        request = gateway_pb2.SampleTokensRequest(
            sampling_session_id=await client.create_sampling_session(session, 0, base_model=model),
            prompt=ModelInput(chunks=[before, image, after]),
            sample_count=1,
            params=sampler_pb2.SamplingParams(
                max_tokens=question.max_tokens, temperature=question.temperature, seed=question.seed
            ),
        )
        async for event in client.sample(request, timeout_s):
            tokens += decode_tokens(event.delta.tokens).tolist()
            logprobs += decode_floats(event.delta.logprobs).tolist()
            reason = event.delta.finish_reason or reason
        await client.finish_session(session)
    return Answer(tokens, logprobs, sampler_pb2.FinishReason.Name(reason))
