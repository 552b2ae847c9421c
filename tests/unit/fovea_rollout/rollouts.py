"""Handmade rollouts for tests."""

from collections.abc import Sequence

from fovea_rollout.environments.environment import Answer
from fovea_rollout.messages import Message, Part, Picture
from fovea_rollout.policies.policy import Sampled, SamplingSettings, Tokens, WeightVersions
from fovea_rollout.trajectory import Failure, Trajectory, Turn

PICTURE_TOKENS = 4


class FourTokenPictures:
    """A policy with pictures of four tokens; it never samples."""

    async def sample(self, prompt: object, settings: SamplingSettings, stop_ids: object, conversation: str) -> Sampled:
        raise NotImplementedError

    async def token_count(self, picture: Picture) -> int:
        return PICTURE_TOKENS


def turn(
    prompt: Sequence[int | Picture],
    ids: Sequence[int],
    logprobs: Sequence[float],
    reward: float = 0.0,
    versions: WeightVersions = WeightVersions(0, 0),
    said: Sequence[Part] = ("look",),
    text: str = "answer",
    **metrics: float,
) -> Turn:
    """Returns a turn that read `prompt` (token ids and pictures) and sampled `ids`."""
    chunks = tuple(Tokens((item,)) if isinstance(item, int) else item for item in prompt)
    sampled = Sampled(tuple(ids), tuple(logprobs), "stop", versions)
    return Turn(chunks, (Message("user", tuple(said)),), sampled, Answer(text), reward, metrics)


def rollout(*turns: Turn, conversation: str = "c", failure: Failure | None = None) -> Trajectory:
    """Returns a rollout with an append-only template."""
    found = Trajectory(conversation, end="failed" if failure else "done", failure=failure)
    for one in turns:
        found.append(one, is_append_only=True)
    return found
