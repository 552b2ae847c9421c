"""Rollouts that run while the weights change: the weights behind each token, and the treatment of stale rollouts."""

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tinker
from transformers import PreTrainedTokenizerBase

from fovea_rollout import (
    Answer,
    ChatTemplate,
    LoopSettings,
    Message,
    Picture,
    RolloutSettings,
    SamplingSettings,
    Step,
    StepReport,
    TrainingDatum,
    Trajectory,
    train,
)
from tests.e2e.fovea_rollout.test_exactness import STORIES
from tests.e2e.prompts import PromptBuilder, picture
from tests.e2e.stack import Stack

TOLERANCE = 1e-3
PORTION, MOST = 2, 24
GROUPS, SIZE = 2, 3
RANDOM = random.Random(0)


@pytest.fixture(scope="module")
def training(stack: Stack, tokenizer: PreTrainedTokenizerBase) -> Iterator[tinker.TrainingClient]:
    """A model that answers in whole sentences; the base answers in one word."""
    with stack.service_client() as service:
        training = service.create_lora_training_client(base_model=stack.model_name, rank=8, seed=3).result()
        data = [PromptBuilder(tokenizer).build(text).datum() for text in STORIES]
        for _ in range(16):
            training.forward_backward(data, "cross_entropy").result()
            training.optim_step(tinker.AdamParams(learning_rate=5e-3)).result()
        yield training


@pytest.fixture(scope="module")
def template(tokenizer: PreTrainedTokenizerBase) -> ChatTemplate:
    return ChatTemplate(tokenizer)


def settings(steps: int, **changes: Any) -> LoopSettings:
    sampling = SamplingSettings(max_tokens=MOST, seed=1)
    given: dict[str, Any] = {
        "steps": steps, "groups_per_step": GROUPS, "group_size": SIZE, "mode": "inflight", "portion": PORTION,
        "learning_rate": 5e-3, "schedule": "constant", "substeps": 1, "kl_coefficient": 0.0,
        "rollout": RolloutSettings(sampling, max_turns=1),
    }  # fmt: skip
    return LoopSettings(**given | changes)


class Held:
    """Holds the rollouts of later groups in the middle of their turns until a step has run.

    Attributes:
        first: Set when the groups of the first step have ended.
        moved: Set when the weights of the first step are published.
        made: The group of each environment.
        closed: Number of closed environments.
        asked: Ids of the sequences of all requests.
    """

    def __init__(self) -> None:
        self.first, self.moved = asyncio.Event(), asyncio.Event()
        self.made: list[int] = []
        self.closed = 0
        self.asked: list[str] = []

    async def experts(self, sequence_id: str) -> npt.NDArray[np.integer] | None:
        """Runs after each request; it returns no experts but delays the rollout."""
        self.asked.append(sequence_id)
        if self.first.is_set():
            await self.moved.wait()
        return None


class Describing:
    """One turn. The reward depends on the answer's text and on chance, so that rewards differ within groups."""

    _prompt: tuple[Picture | str, ...] = ("What is it?",)

    def __init__(self, held: Held, group: int) -> None:
        self._held, self._group = held, group
        held.made.append(group)

    async def reset(self) -> list[Message]:
        if self._group >= GROUPS:
            await self._held.first.wait()
        return [Message("user", self._prompt)]

    async def step(self, answer: Answer) -> Step:
        return Step([], sum(map(ord, answer.text)) % 7 + RANDOM.random(), is_done=True)

    async def close(self) -> None:
        self._held.closed += 1
        if self._held.closed == GROUPS * SIZE:
            self._held.first.set()


def in_order(made: Sequence[Callable[[], Describing]]) -> list[Callable[[], Describing]]:
    """Returns the sources of an epoch, ordered so that group i plays `made[i]`."""
    order = np.random.default_rng([0, 0]).permutation(len(made))
    return [made[group] for group in np.argsort(order)]


async def scores(client: tinker.SamplingClient, made: TrainingDatum) -> npt.NDArray[np.float64]:
    """Returns the log-probabilities of a datum's targets by the weights of a client, float64 [N]."""
    last = int(made.datum.loss_fn_inputs["target_tokens"].to_numpy()[-1])
    whole = made.datum.model_input.append(tinker.EncodedTextChunk(tokens=[last]))
    found = await client.compute_logprobs(whole)
    return np.array(found[1:], np.float64)


async def differences(clients: Sequence[tinker.SamplingClient], made: TrainingDatum) -> npt.NDArray[np.float64]:
    """Returns the differences between recorded log-probabilities and those of each version, [versions, sampled]."""
    recorded = made.datum.loss_fn_inputs["logprobs"].to_numpy()
    return np.stack([np.abs(await scores(client, made) - recorded)[made.mask] for client in clients])


def tokens_of(trajectory: Trajectory) -> list[int]:
    return [token for turn in trajectory.turns for token in turn.sampled.ids]


@pytest.mark.parametrize("loss", ["cispo", "stable_reinforce"])
async def test_a_turn_that_straddles_a_step_is_resumed_with_the_new_weights(
    training: tinker.TrainingClient, template: ChatTemplate, loss: Any
) -> None:
    """With stable_reinforce, the server also compares each datum with its own record of each request."""
    held, reports = Held(), list[StepReport]()
    before = await training.save_weights_and_get_sampling_client()

    def note(report: StepReport) -> None:
        reports.append(report)
        held.moved.set()

    sources = in_order([partial(Describing, held, group) for group in range(2 * GROUPS)])
    await train(training, template, sources, settings(2, loss=loss), note, experts=held.experts)
    assert [report.failures for report in reports] == [(), ()]
    assert [report.lag for report in reports] == [0, 1]
    clients = [before, reports[0].policy._client]  # type: ignore[attr-defined]
    straddling, gaps = 0, []
    for made in reports[1].data:
        stamps = made.token_versions[made.mask]
        assert (made.token_versions[~made.mask] == -1).all()
        assert stamps[:PORTION].tolist() == [[0, 0]] * len(stamps[:PORTION]), (
            "a request must run while the weights change"
        )
        assert stamps[PORTION:].tolist() == [[1, 1]] * len(stamps[PORTION:])
        found = await differences(clients, made)
        assert found[stamps[:, 0], np.arange(len(stamps))].max() < TOLERANCE
        if len(stamps) > PORTION:
            straddling += 1
            gaps.append((found[1][:PORTION].max(), found[0][PORTION:].max()))
    assert straddling, "a turn must span the change"
    assert min(np.max(gaps, axis=0)) > 10 * TOLERANCE, "the other version's weights must give other log-probabilities"
    trajectories = {one.conversation: one for group in reports[1].trajectories for one in group}
    for made in reports[1].data:
        targets = made.datum.loss_fn_inputs["target_tokens"].to_numpy()[made.mask].tolist()
        assert targets == tokens_of(trajectories[made.conversation])
    used = [
        portion for report in reports for group in report.trajectories for one in group for turn in one.turns
        for portion in turn.sampled.portions
    ]  # fmt: skip
    assert sorted(held.asked) == sorted(portion.sequence_id for portion in used), "every request's tokens must be used"
    assert max(portion.count for portion in used) == PORTION
    if loss == "stable_reinforce":
        counted = [report.metrics["trainer/policy_tokens:sum"] for report in reports]
        assert counted == [report.trained_tokens for report in reports]
        assert reports[0].metrics["trainer/ratio:max"] == pytest.approx(1.0, abs=TOLERANCE)


async def test_a_group_beyond_max_lag_is_cancelled_and_played_again(
    training: tinker.TrainingClient, template: ChatTemplate
) -> None:
    """The rollouts of one group hang until they are cancelled. On the second attempt they end."""
    held, reports, begun = Held(), list[StepReport](), iter(range(1000))
    held.first.set()

    class Hanging(Describing):
        _prompt = (Picture.of_bytes(picture(150, 224, 1)), "What is it?")

        def __init__(self, held: Held, group: int) -> None:
            super().__init__(held, group)
            self._hangs = group == 3 and next(begun) < SIZE

        async def step(self, answer: Answer) -> Step:
            if self._hangs:
                await asyncio.Event().wait()
            return await super().step(answer)

    sources = in_order([partial(Hanging, held, group) for group in range(4 * GROUPS)])
    await train(training, template, sources, settings(4, max_lag=1), reports.append)
    cancelled = [report.cancelled_groups for report in reports]
    assert cancelled[0] == 0
    assert cancelled[1] >= 1
    assert max(report.lag for report in reports) == 1
    assert [report.failures for report in reports] == [()] * 4
    played = [one for report in reports for group in report.trajectories for one in group]
    names = [f"group-{index}/{member}" for index in range(4 * GROUPS) for member in range(SIZE)]
    assert sorted(one.conversation for one in played) == sorted(names), "each group must be trained on once"
    versions = [one.versions for one in played if one.conversation.startswith("group-3/")]
    assert all(each is not None and each.oldest >= 1 for each in versions), "it must start again with newer weights"
    assert len(held.made) == held.closed == len(played) + SIZE * sum(cancelled), "cancelled environments must be closed"
