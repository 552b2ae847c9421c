"""Trajectories as training examples: exactly the tokens that were read and written, loss on the latter only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import tinker
from tinker.types import ImageChunk

from fovea.wire.errors import InvalidInput
from fovea_rollout.policy import Chunk, Policy, Tokens, WeightVersions
from fovea_rollout.trajectory import Segment, Trajectory, joined_versions

Floats = npt.NDArray[np.float32]
_DTYPES = {"target_tokens": np.int64, "logprobs": np.float32, "advantages": np.float32}


@dataclass(frozen=True)
class TrainingDatum:
    """A datum, and where it comes from.

    Attributes:
        datum: For `importance_sampling` and `ppo`.
        versions: Of the weights that sampled its tokens.
        conversation: Of the rollout.
        turns: Indices of the turns that its loss is on.
        pictures: Their digests, in order.
        mask: bool [N]: which targets were sampled.
    """

    datum: tinker.Datum
    versions: WeightVersions
    conversation: str
    turns: tuple[int, ...]
    pictures: tuple[str, ...]
    mask: npt.NDArray[np.bool_]


async def training_datums(
    trajectory: Trajectory, advantages: Sequence[float] | Sequence[npt.ArrayLike], policy: Policy
) -> list[TrainingDatum]:
    """One datum a segment.

    Each has `target_tokens` (int64 [N], 0 where nothing was sampled), `logprobs` and `advantages` (float32 [N], 0
    there), N being the input's tokens: all but the last sampled one, pictures counted by their placeholders.

    Args:
        advantages: One a turn, or for each turn one a sampled token.
        policy: Says how many tokens a picture takes.

    Raises:
        InvalidInput: If `advantages` has another shape than what was sampled.
    """
    if len(advantages) != len(trajectory.turns):
        raise InvalidInput(
            f"advantages has {len(advantages)} rows; the rollout has {len(trajectory.turns)} turns", field="advantages"
        )
    lengths = [len(turn.sampled.ids) for turn in trajectory.turns]
    rows = [_row(value, length, i) for i, (value, length) in enumerate(zip(advantages, lengths, strict=True))]
    return [await _datum(trajectory, segment, rows, policy) for segment in trajectory.segments if segment.sampled]


async def _datum(trajectory: Trajectory, segment: Segment, rows: Sequence[Floats], policy: Policy) -> TrainingDatum:
    turn_of = dict(zip(segment.sampled, segment.turns, strict=True))
    chunks: list[tinker.EncodedTextChunk | ImageChunk] = []
    columns: dict[str, list[npt.NDArray]] = {name: [] for name in (*_DTYPES, "mask")}
    for index, chunk in enumerate(segment.chunks[: max(turn_of) + 1]):
        chunks.append(await model_input_chunk(chunk, policy))
        values: tuple[npt.ArrayLike, ...] = (np.zeros(chunks[-1].length),) * 4
        if index in turn_of and isinstance(chunk, Tokens):
            values = (chunk.ids, segment.sampled[index], rows[turn_of[index]], np.ones(len(chunk.ids)))
        for column, value in zip(columns.values(), values, strict=True):
            column.append(np.asarray(value))
    # What is left of the last chunk is what predicts its last token.
    last = chunks.pop()
    assert isinstance(last, tinker.EncodedTextChunk), "only tokens are sampled"
    if last.length > 1:
        chunks.append(tinker.EncodedTextChunk(tokens=last.tokens[:-1]))
    shifted = {name: np.concatenate(column)[1:] for name, column in columns.items()}
    inputs = {name: tinker.TensorData.from_numpy(shifted[name].astype(dtype)) for name, dtype in _DTYPES.items()}
    return TrainingDatum(
        tinker.Datum(model_input=tinker.ModelInput(chunks=chunks), loss_fn_inputs=inputs),
        joined_versions([trajectory.turns[turn] for turn in segment.turns]),
        trajectory.conversation,
        segment.turns,
        tuple(picture.digest for picture in segment.pictures),
        shifted["mask"].astype(np.bool_),
    )


async def model_input_chunk(chunk: Chunk, policy: Policy) -> tinker.EncodedTextChunk | ImageChunk:
    """A chunk as the SDK sends it; pictures say how many tokens they take, so that their length is known."""
    if isinstance(chunk, Tokens):
        return tinker.EncodedTextChunk(tokens=list(chunk.ids))
    return ImageChunk(data=chunk.data, format=chunk.format, expected_tokens=await policy.token_count(chunk))


def _row(value: npt.ArrayLike, length: int, turn: int) -> Floats:
    row = np.asarray(value, np.float32)
    if row.shape not in ((), (length,)):
        raise InvalidInput(
            f"advantages[{turn}] has shape {row.shape}; give one number, or one for each of its {length} tokens",
            field=f"advantages[{turn}]",
        )
    return np.broadcast_to(row, (length,))
