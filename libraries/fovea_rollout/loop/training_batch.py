"""Makes training examples from trajectories: exactly the tokens that the model read and wrote.

The tokens that it wrote have a loss. A rollout becomes one datum per segment. The groups of a step become one batch
with advantages.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from fovea.wire.errors import FailedPrecondition, InvalidInput
from fovea_rollout.late_sdk import tinker
from fovea_rollout.loop.advantages import ESTIMATORS, Estimator, Rewards, groups_with_signal
from fovea_rollout.loop.kl_penalty import base_logprobs, kl_penalty
from fovea_rollout.loop.provenance import with_provenance
from fovea_rollout.policies.policy import Chunk, Policy, Sampled, Tokens, WeightVersions, joined_versions
from fovea_rollout.trajectory import Failure, Segment, Trajectory

Floats = npt.NDArray[np.float32]
_DTYPES = {"target_tokens": np.int64, "logprobs": np.float32, "advantages": np.float32}


@dataclass(frozen=True)
class TrainingDatum:
    """A datum and its origin.

    Attributes:
        datum: A datum for `importance_sampling`, `ppo` and the like.
        versions: Bounds of the weights that sampled its tokens.
        conversation: Id of the rollout.
        turns: Indices of the turns with a loss on their tokens.
        pictures: Digests of its pictures, in order.
        mask: bool [N], true for sampled targets.
        token_versions: int64 [N, 2], the oldest and the newest weights that may have sampled each target; -1 for
            targets that were not sampled.
    """

    datum: tinker.Datum
    versions: WeightVersions
    conversation: str
    turns: tuple[int, ...]
    pictures: tuple[str, ...]
    mask: npt.NDArray[np.bool_]
    token_versions: npt.NDArray[np.int64]


async def training_datums(
    trajectory: Trajectory, advantages: Sequence[float] | Sequence[npt.ArrayLike], policy: Policy
) -> list[TrainingDatum]:
    """Makes one datum per segment of a trajectory.

    Each datum has `target_tokens` (int64 [N]), `logprobs` and `advantages` (float32 [N]), which are 0 for targets that
    were not sampled. N is the number of input tokens, all but the last sampled one, with the placeholders of pictures.
    If all turns have their experts, the datum also has `routed_experts` (int64 [N, words], packed bytes). If the server
    reported the ids of all sequences, the datum names them as the provenance of its tokens.

    Args:
        trajectory: The trajectory.
        advantages: One number per turn, or one array per turn with a number per sampled token.
        policy: Counts the tokens of pictures.

    Raises:
        InvalidInput: The shape of `advantages` is not that of the turns.
    """
    if len(advantages) != len(trajectory.turns):
        raise InvalidInput(
            f"advantages has {len(advantages)} rows, but the rollout has {len(trajectory.turns)} turns",
            field="advantages",
        )
    lengths = [len(turn.sampled.ids) for turn in trajectory.turns]
    rows = [_row(value, length, i) for i, (value, length) in enumerate(zip(advantages, lengths, strict=True))]
    return [await _datum(trajectory, segment, rows, policy) for segment in trajectory.segments if segment.sampled]


async def _datum(trajectory: Trajectory, segment: Segment, rows: Sequence[Floats], policy: Policy) -> TrainingDatum:
    turn_of = dict(zip(segment.sampled, segment.turns, strict=True))
    chunks: list[tinker.EncodedTextChunk | tinker.types.ImageChunk] = []
    columns: dict[str, list[npt.NDArray]] = {name: [] for name in (*_DTYPES, "mask", "versions")}
    for index, chunk in enumerate(segment.chunks[: max(turn_of) + 1]):
        chunks.append(await model_input_chunk(chunk, policy))
        length = chunks[-1].length
        values: tuple[npt.ArrayLike, ...] = (*[np.zeros(length)] * 4, np.full((length, 2), -1))
        if index in turn_of and isinstance(chunk, Tokens):
            stamps = _stamps(trajectory.turns[turn_of[index]].sampled)
            values = (chunk.ids, segment.sampled[index], rows[turn_of[index]], np.ones(length), stamps)
        for column, value in zip(columns.values(), values, strict=True):
            column.append(np.asarray(value))
    lengths = [chunk.length for chunk in chunks]
    # The last sampled token is only a target: the rest of its chunk predicts it.
    last = chunks.pop()
    assert isinstance(last, tinker.EncodedTextChunk), "only tokens are sampled"
    if last.length > 1:
        chunks.append(tinker.EncodedTextChunk(tokens=last.tokens[:-1]))
    shifted = {name: np.concatenate(column)[1:] for name, column in columns.items()}
    inputs = {name: tinker.TensorData.from_numpy(shifted[name].astype(dtype)) for name, dtype in _DTYPES.items()}
    experts = _experts([trajectory.turns[turn].sampled for turn in segment.turns])
    if experts is not None:
        inputs["routed_experts"] = tinker.TensorData.from_numpy(experts)
    datum = tinker.Datum(model_input=tinker.ModelInput(chunks=chunks), loss_fn_inputs=inputs)
    portions = {index: trajectory.turns[turn].sampled.portions for index, turn in turn_of.items()}
    return TrainingDatum(
        with_provenance(datum, lengths, portions),
        joined_versions(trajectory.turns[turn].sampled.versions for turn in segment.turns),
        trajectory.conversation,
        segment.turns,
        tuple(picture.digest for picture in segment.pictures),
        shifted["mask"].astype(np.bool_),
        shifted["versions"].astype(np.int64),
    )


def _stamps(sampled: Sampled) -> npt.NDArray[np.int64]:
    """Returns int64 [C, 2], the oldest and the newest weights that may have sampled each token of a turn."""
    bounds = np.array([[one.versions.oldest, one.versions.newest] for one in sampled.portions], np.int64)
    return np.repeat(bounds, [one.count for one in sampled.portions], axis=0)


def _experts(samples: Sequence[Sampled]) -> npt.NDArray[np.int64] | None:
    """Returns int64 [N, words]: the experts of each token, from the first turn that read or wrote it, padded to words.

    The rows of each turn begin with those of its whole prompt, which contains all earlier turns.
    """
    rows: npt.NDArray[np.integer] | None = None
    for sampled in samples:
        if sampled.experts is None:
            return None
        rows = sampled.experts if rows is None else np.concatenate([rows, sampled.experts[len(rows) :]])
    if rows is None:
        return None
    given = np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), -1)
    return np.pad(given, ((0, 0), (0, -given.shape[1] % 8))).view(np.int64)


async def model_input_chunk(chunk: Chunk, policy: Policy) -> tinker.EncodedTextChunk | tinker.types.ImageChunk:
    """Converts a chunk for the SDK. A picture gets its number of tokens, so that the SDK knows its length."""
    if isinstance(chunk, Tokens):
        return tinker.EncodedTextChunk(tokens=list(chunk.ids))
    return tinker.types.ImageChunk(
        data=chunk.data, format=chunk.format, expected_tokens=await policy.token_count(chunk)
    )


def _row(value: npt.ArrayLike, length: int, turn: int) -> Floats:
    row = np.asarray(value, np.float32)
    if row.shape not in ((), (length,)):
        raise InvalidInput(
            f"advantages[{turn}] has shape {row.shape}; it must be one number, or one for each of its {length} tokens",
            field=f"advantages[{turn}]",
        )
    return np.broadcast_to(row, (length,))


Groups = Sequence[Sequence[Trajectory]]


@dataclass(frozen=True)
class TrainingBatch:
    """The training data of one step.

    Attributes:
        data: Datums in the order of groups and trajectories, one per segment.
        base_kl: Distance to the base model in nats per token; None without a KL penalty.
    """

    data: list[TrainingDatum]
    base_kl: float | None = None

    @property
    def masks(self) -> list[npt.NDArray[np.bool_]]:
        """The masks of sampled targets, bool [N] per datum."""
        return [datum.mask for datum in self.data]

    def logprobs(self) -> list[npt.NDArray[np.float64]]:
        """Returns the sampler's log-probabilities, float64 [N] per datum."""
        return [_column(datum, "logprobs") for datum in self.data]

    def split(self, count: int, seed: Sequence[int]) -> list[TrainingBatch]:
        """Splits the batch into at most `count` parts of nearly equal size, at random if there are several."""
        order = np.random.default_rng(seed).permutation(len(self.data)) if count > 1 else np.arange(len(self.data))
        return [
            TrainingBatch([self.data[i] for i in part], self.base_kl)
            for part in np.array_split(order, count)
            if part.size
        ]

    def without(self, conversations: Container[str]) -> TrainingBatch:
        """Returns the batch without the datums of some rollouts."""
        return replace(self, data=[datum for datum in self.data if datum.conversation not in conversations])

    def penalised(self, scores: Sequence[npt.NDArray[np.float64]], coefficient: float) -> TrainingBatch:
        """Returns the batch with the KL penalty of `kl_penalty` added to its advantages.

        Args:
            scores: The base model's log-probabilities, float64 [N] per datum.
        """
        penalty = kl_penalty(self.logprobs(), scores, self.masks, coefficient)
        data = [
            _with_advantages(datum, _column(datum, "advantages") + term)
            for datum, term in zip(self.data, penalty.terms, strict=True)
        ]
        return TrainingBatch(data, penalty.kl)


def check_some_scored(groups: Groups, step: int) -> None:
    """Checks that a rollout of a step counts. A fault in all of them would otherwise cost every later step too.

    Args:
        groups: All rollouts of the step.
        step: Number of the step, from 0.

    Raises:
        FailedPrecondition: None counts. The message contains the stage and the error of the first, its notes the
            traceback and the message again, so that a program ends with it.
    """
    trajectories = [one for group in groups for one in group]
    if any(one.is_scored for one in trajectories):
        return
    failure = next((one.failure for one in trajectories if one.failure), None)
    if failure is None:
        seen = "without a turn: the first prompt and max_tokens do not fit into max_context"
    else:
        seen = f"the first in stage {failure.stage!r}: {failure.error}"
    error = FailedPrecondition(f"all {len(trajectories)} rollouts of step {step + 1} failed, {seen}", field="sources")
    if failure is not None and failure.traceback:
        error.add_note(failure.traceback)
        error.add_note(error.message)
    raise error


def rewards_of(groups: Groups) -> Rewards:
    """Returns total rewards, float64 [groups, size]; NaN for rollouts that failed or have no turn."""
    return np.array(
        [[one.reward if one.is_scored else np.nan for one in group] for group in groups], dtype=np.float64
    ).reshape(len(groups), len(groups[0]) if groups else 0)


def returns_of(group: Sequence[Trajectory], discount: float) -> Rewards:
    """Returns the discounted return of each turn, float64 [turns, size].

    A row compares the rollouts at one turn. It has NaN for rollouts that failed or ended before that turn.
    """
    returns = np.full((max((len(one.turns) for one in group), default=0), len(group)), np.nan)
    for place, trajectory in enumerate(group):
        following = 0.0
        for index in reversed(range(len(trajectory.turns) if trajectory.is_scored else 0)):
            following = trajectory.turns[index].reward + discount * following
            returns[index, place] = following
    return returns


async def training_batch(
    groups: Groups, estimator: Estimator, *, filter_groups: bool, policy: Policy, discount: float | None = None
) -> TrainingBatch:
    """Makes datums from all rollouts that did not fail. If a rollout cannot become a datum, it is marked as failed.

    Args:
        groups: Groups of equal size.
        estimator: How advantages are computed.
        filter_groups: Leaves out groups without a gradient, in which all rewards are the same. With a `discount`, these
            are groups in which the returns of each turn are the same.
        policy: Counts the tokens of pictures.
        discount: Factor of later rewards, 0 to 1: each turn gets the advantage of its own return among the group's
            rollouts at that turn. None: all turns of a rollout get the advantage of its total reward.

    Raises:
        Exception: The first error, if several rollouts failed and no datum could be made: then a setting or the server
            is wrong, not a rollout.
    """
    data: list[TrainingDatum] = []
    errors: list[Exception] = []
    for group in groups:
        made, failed = await _group_data(group, estimator, filter_groups, policy, discount)
        while failed:
            errors += failed.values()
            fail_rollouts([group], "batch", failed)
            # The advantages of the others are computed again, without the reward of the one that failed.
            made, failed = await _group_data(group, estimator, filter_groups, policy, discount)
        data += made
    if len(errors) > 1 and not data:
        raise errors[0]
    return TrainingBatch(data)


async def _group_data(
    group: Sequence[Trajectory], estimator: Estimator, filter_groups: bool, policy: Policy, discount: float | None
) -> tuple[list[TrainingDatum], dict[str, Exception]]:
    """Returns the datums of a group, and the error of each conversation that cannot become datums."""
    data: list[TrainingDatum] = []
    errors: dict[str, Exception] = {}
    rewards = rewards_of([group]) if discount is None else returns_of(group, discount)
    if filter_groups and not groups_with_signal(rewards).any():
        return data, errors
    advantages = ESTIMATORS[estimator](rewards)
    for place, trajectory in enumerate(group):
        if not trajectory.is_scored:
            continue
        turns = len(trajectory.turns)
        rows = np.broadcast_to(advantages[:, place], turns) if discount is None else advantages[:turns, place]
        try:
            data += await training_datums(trajectory, rows.tolist(), policy)
        except Exception as error:  # of any class: the policy may call a server, and a sample may be malformed
            errors[trajectory.conversation] = error
    return data, errors


def fail_rollouts(groups: Groups, stage: str, errors: Mapping[str, Exception]) -> None:
    """Marks rollouts as failed, and logs them.

    Args:
        stage: As in `Failure`.
        errors: By conversation.
    """
    for trajectory in (one for group in groups for one in group if one.conversation in errors):
        trajectory.fail(Failure.of(stage, errors[trajectory.conversation]))


async def penalised_batch(
    groups: Groups, make: Callable[[], Awaitable[TrainingBatch]], base: tinker.SamplingClient, coefficient: float
) -> TrainingBatch:
    """Returns a batch with a KL penalty. A rollout that the base model cannot score is marked as failed.

    Args:
        groups: All rollouts of the step.
        make: Makes the batch of the rollouts that did not fail, without a penalty. It is called again after rollouts
            were marked as failed, so that their groups' statistics leave them out too.
        base: Client of the base model.
        coefficient: Beta, in reward per nat.

    Raises what `base_logprobs` raises.
    """
    batch = await make()
    found = await base_logprobs([datum.datum for datum in batch.data], batch.masks, base)
    scores: dict[tuple[str, tuple[int, ...]], npt.NDArray[np.float64]] = {}
    errors: dict[str, Exception] = {}
    for datum, score in zip(batch.data, found, strict=True):
        if isinstance(score, Exception):
            errors.setdefault(datum.conversation, score)
        else:
            scores[datum.conversation, datum.turns] = score
    if errors:
        fail_rollouts(groups, "score", errors)
        batch = await make()
    if not batch.data:
        return batch
    return batch.penalised([scores[datum.conversation, datum.turns] for datum in batch.data], coefficient)


def _column(datum: TrainingDatum, name: str) -> npt.NDArray[np.float64]:
    return np.asarray(datum.datum.loss_fn_inputs[name].to_numpy(), dtype=np.float64)


def _with_advantages(datum: TrainingDatum, advantages: npt.NDArray[np.float64]) -> TrainingDatum:
    inputs = dict(datum.datum.loss_fn_inputs)
    inputs["advantages"] = tinker.TensorData.from_numpy(advantages.astype(np.float32))
    return replace(datum, datum=replace(datum.datum, loss_fn_inputs=inputs))
