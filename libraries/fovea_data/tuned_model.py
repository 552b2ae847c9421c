"""The result of a fine-tuning run: a model to ask, its checkpoints, and the metrics of the run."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from fovea.wire.errors import FailedPrecondition
from fovea_data.connection import Connection
from fovea_data.conversation import Asking, RowReader
from fovea_data.encoder import Encoder
from fovea_data.model_export import export_model
from fovea_data.rows import PICTURE_SUFFIXES
from fovea_rollout.late_sdk import tinker
from fovea_rollout.messages import Message, Part, Picture
from fovea_rollout.pictures import read_picture


@dataclass(frozen=True)
class TunedModel:
    """A fine-tuned model.

    Attributes:
        connection: Connection to the model in training, with the weights of the last step, and its encoder.
        weights: Checkpoint of the best evaluation, `tinker://...`, to sample from, download or merge.
        state: Checkpoint of the last step with the optimizer's state, to continue training from.
        sampling: Client that samples from `weights`; None if the run had no sampler.
        history: The rows of `metrics.jsonl`: one mapping per step or evaluation.
        max_side: The most pixels of a picture's longer side in training. Larger pictures are shrunk to it before the
            model sees them. None does not limit the size.
        asking: The texts that asked about the picture in training, if all rows had the same.
    """

    connection: Connection
    weights: str
    state: str
    sampling: tinker.SamplingClient | None
    history: Sequence[dict[str, float]]
    max_side: int | None = None
    asking: Asking | None = None

    def close(self) -> None:
        """Ends the session. The server drops weights that are not saved."""
        self.connection.server.service.close("success")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()

    @property
    def losses(self) -> list[float]:
        """Mean loss of the answers' tokens in nats, by step."""
        return [row["loss"] for row in self.history if "loss" in row]

    @property
    def best(self) -> dict[str, float]:
        """Metrics of the best evaluation: `held_out_loss`, `accuracy` with a sampler; empty without held-out rows."""
        found = [row for row in self.history if "held_out_loss" in row]
        return min(found, key=lambda row: row["held_out_loss"], default={})

    def export(self, directory: str | pathlib.Path, *, merged: bool = False, base: str | None = None) -> pathlib.Path:
        """Writes `weights` as a PEFT adapter, or as a merged model (see `export_model`)."""
        server = self.connection.server
        return export_model(
            self.weights, directory, merged=merged, base=base, base_url=server.base_url, api_key=server.api_key
        )

    def ask(self, *parts: str | Picture | pathlib.Path, max_tokens: int = 256) -> str:
        """Returns the model's greedy answer to a message.

        Args:
            parts: Texts, pictures and paths of pictures, in order. A text that is the path of an existing picture is
                read as a path. Pictures are shrunk to `max_side`, as in training. A picture alone is asked the question
                of training (`asking`).
            max_tokens: The most tokens of the answer.
        """
        read = tuple(_part(part) for part in parts)
        question: Sequence[Message] = (Message("user", read),)
        if self.asking and len(read) == 1 and isinstance(read[0], Picture):
            question = RowReader().messages(self.asking.messages(read[0]), "question")
        return self.answers([question], max_tokens)[0]

    def answers(self, questions: Sequence[Sequence[Message]], max_tokens: int = 256) -> list[str]:
        """Returns the model's greedy answer to each question. Pictures are shrunk to `max_side`, as in training.

        Raises:
            FailedPrecondition: The run had no sampler.
        """
        if self.sampling is None:
            raise FailedPrecondition("this run had no sampler: create a sampling client from `weights`")
        shrunk = [[self._shrunk(message) for message in one] for one in questions]
        return [text for text, _ in answers(self.sampling, self.connection.encoder, shrunk, max_tokens)]

    def _shrunk(self, message: Message) -> Message:
        return replace(
            message,
            parts=tuple(
                read_picture(part, max_side=self.max_side) if isinstance(part, Picture) else part
                for part in message.parts
            ),
        )


def _part(part: str | Picture | pathlib.Path) -> Part:
    if isinstance(part, Picture):
        return part
    if isinstance(part, str):
        names_a_picture = pathlib.PurePath(part[-256:]).suffix.lower() in PICTURE_SUFFIXES and os.path.isfile(part)
        return read_picture(part) if names_a_picture else part
    return read_picture(part)


def answers(
    sampling: tinker.SamplingClient, encoder: Encoder, questions: Sequence[Sequence[Message]], max_tokens: int
) -> list[tuple[str, str]]:
    """Returns greedy answers to all questions, which are submitted at once, and their ids. Raises what the SDK raises.

    An id is empty if the server gives none.

    Args:
        sampling: Client that samples.
        encoder: Encoder of the model.
        questions: The messages of each question.
        max_tokens: The most tokens of an answer. The remaining context may allow fewer.
    """
    pending = []
    for one in questions:
        room = encoder.room(one)
        most = max_tokens if room is None else max(min(max_tokens, room), 1)
        params = tinker.SamplingParams(max_tokens=most, temperature=0.0, stop=list(encoder.stop_ids))
        pending.append(sampling.sample(encoder.prompt(one), num_samples=1, sampling_params=params))
    sequences = [future.result().sequences[0] for future in pending]
    texts = (encoder.read(one.tokens, is_cut=one.stop_reason == "length") for one in sequences)
    return [(text, one.sequence_id or "") for text, one in zip(texts, sequences, strict=True)]
