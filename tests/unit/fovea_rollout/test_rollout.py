"""One episode: its end, its record, and the closing of its environment."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from fovea_rollout import rollout as rollouts
from fovea_rollout.environments.environment import Answer, Step
from fovea_rollout.messages import MessageLike, Picture
from fovea_rollout.policies.policy import Chunk, Sampled, SamplingSettings, derived_seed
from fovea_rollout.rollout import RolloutSettings, run_rollout
from fovea_rollout.trajectory import Trajectory
from tests.unit.fovea_rollout.scripted import PICTURE_TOKENS, LetterTemplate, ScriptedPolicy, text_of

RED = Picture.of_pixels(np.zeros((4, 4, 3), np.uint8))
SETTINGS = RolloutSettings(SamplingSettings(max_tokens=8, seed=1), max_turns=4, max_context=200, deadline_s=30.0)


class Guess:
    """Asks until it gets `yes`. `faults` maps a method to its error or action."""

    def __init__(self, **faults: Any) -> None:
        self.faults, self.calls, self.threads = faults, [], set()

    async def reset(self) -> Sequence[MessageLike]:
        await self._note("reset")
        return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": RED.data_uri}}]}]

    async def step(self, answer: Answer) -> Step:
        await self._note("step")
        said = answer.text
        return Step(
            [{"role": "user", "content": f"no {said}"}], float(len(said)), said == "yes", {"letters": len(said)}
        )

    async def close(self) -> None:
        await self._note("close")

    async def _note(self, name: str) -> None:
        self.calls.append(name)
        fault = self.faults.get(name)
        if isinstance(fault, BaseException):
            raise fault
        if fault is not None:
            await asyncio.sleep(fault)


class PlainGuess(Guess):
    """The same with synchronous methods."""

    def reset(self) -> Sequence[MessageLike]:  # type: ignore[override]
        return self._run(super().reset())  # type: ignore[no-any-return]

    def step(self, answer: Answer) -> Step:  # type: ignore[override]
        return self._run(super().step(answer))  # type: ignore[no-any-return]

    def close(self) -> None:  # type: ignore[override]
        self._run(super().close())

    def _run(self, coroutine: Any) -> Any:
        self.threads.add(threading.current_thread())
        return asyncio.run(coroutine)


async def play(
    environment: Any, script: Any = lambda prompt: "no|", settings: RolloutSettings = SETTINGS, strips: bool = False
) -> Trajectory:
    policy = script if isinstance(script, ScriptedPolicy) else ScriptedPolicy(script)
    template: Any = LetterTemplate(strips)
    return await run_rollout(policy, template, lambda: environment, settings, "c")


@pytest.mark.parametrize("kind", [Guess, PlainGuess])
async def test_until_the_environment_is_done(kind: type[Guess]) -> None:
    environment = kind()
    trajectory = await play(environment, lambda prompt: "yes|" if "no no" in prompt else "no|")
    assert (trajectory.end, trajectory.failure) == ("done", None)
    assert [text_of(turn.prompt) for turn in trajectory.turns] == ["u:#|a:", "u:#|a:no|u:no no|a:"]
    assert [turn.reward for turn in trajectory.turns] == [2.0, 3.0]
    assert [turn.metrics for turn in trajectory.turns] == [{"letters": 2}, {"letters": 3}]
    assert [[m.text for m in turn.new_messages] for turn in trajectory.turns] == [[""], ["no no"]]
    (segment,) = trajectory.segments
    assert text_of(segment.chunks) == "u:#|a:no|u:no no|a:yes|"
    assert segment.turns == (0, 1)
    assert environment.calls == ["reset", "step", "step", "close"]
    assert trajectory.prefix_breaks == trajectory.rewrites == 0
    if kind is PlainGuess:
        assert len(environment.threads) == 1, "one thread for all calls"
        assert threading.current_thread() not in environment.threads


async def test_until_the_turns_are_used_up() -> None:
    trajectory = await play(Guess())
    assert (trajectory.end, len(trajectory.turns)) == ("max_turns", 4)


async def test_until_the_context_is_full() -> None:
    first = len("u:") + PICTURE_TOKENS + len("|a:")
    second = first + len("no|u:no no|a:")
    for max_context, turns in ((second + 8, 2), (second + 7, 1), (first + 7, 0)):
        settings = RolloutSettings(SamplingSettings(max_tokens=8), max_turns=2, max_context=max_context)
        trajectory = await play(Guess(), settings=settings)
        assert (trajectory.end, len(trajectory.turns)) == ("max_turns" if turns == 2 else "context", turns)
        assert all(text_of(segment.chunks).endswith("no|") for segment in trajectory.segments)


async def test_a_turn_that_was_cut_is_closed_by_the_template_without_loss() -> None:
    (segment,) = (await play(Guess(), lambda prompt: "yes|" if "no" in prompt else "uncut")).segments
    assert text_of(segment.chunks) == "u:#|a:uncut|u:no uncut|a:yes|"
    assert [text_of([segment.chunks[index]]) for index in segment.sampled] == ["uncut", "yes|"]


async def test_stripped_thinking_makes_a_segment_a_turn() -> None:
    trajectory = await play(Guess(), lambda prompt: "hm>yes|" if "no" in prompt else "hm>no|", strips=True)
    assert [text_of(segment.chunks) for segment in trajectory.segments] == [
        "u:#|a:hm>no|",
        "u:#|a:no|u:no no|a:hm>yes|",
    ]
    assert (trajectory.rewrites, trajectory.prefix_breaks) == (1, 0)
    assert [segment.turns for segment in trajectory.segments] == [(0,), (1,)]


@pytest.mark.parametrize("kind", [Guess, PlainGuess])
@pytest.mark.parametrize("stage", ["reset", "step", "close"])
@pytest.mark.parametrize("error", [ValueError("broke"), SystemExit("broke")])
async def test_a_crash_is_recorded_and_the_environment_closed(
    kind: type[Guess], stage: str, error: BaseException
) -> None:
    environment = kind(**{stage: error})
    trajectory = await play(environment, lambda prompt: "yes|")
    assert trajectory.failure is not None
    assert trajectory.failure.stage == stage
    assert "broke" in trajectory.failure.error
    assert f'_note("{stage}")' in trajectory.failure.traceback
    assert trajectory.end == ("done" if stage == "close" else "failed")
    assert environment.calls.count("close") == 1
    assert len(trajectory.turns) == (0 if stage == "reset" else 1), "sampled turns must be kept"


async def test_a_plain_method_may_raise_stop_iteration() -> None:
    class Exhausted(Guess):
        def step(self, answer: Answer) -> Step:  # type: ignore[override]
            return next(iter(()))

    trajectory = await play(Exhausted())
    assert trajectory.failure is not None
    assert (trajectory.failure.stage, "StopIteration" in trajectory.failure.error) == ("step", True)


class Panic(BaseException):
    """An error that is not an Exception, as extensions in Rust raise."""


@pytest.mark.parametrize("stage", ["reset", "step", "close"])
async def test_an_error_of_any_class_ends_its_own_rollout(stage: str) -> None:
    trajectory = await play(Guess(**{stage: Panic("index out of bounds")}))
    assert trajectory.failure is not None
    assert (trajectory.failure.stage, trajectory.failure.error) == (stage, "Panic: index out of bounds")


async def test_a_machine_without_a_further_thread_fails_the_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        trajectory = await play(Guess())
    assert trajectory.failure is not None
    assert (trajectory.failure.stage, trajectory.end) == ("make", "failed")


async def test_an_environment_that_cannot_be_created_is_recorded() -> None:
    def factory() -> Any:
        raise OSError("no display")

    template: Any = LetterTemplate()
    trajectory = await run_rollout(ScriptedPolicy(lambda p: "|"), template, factory, SETTINGS, "c")
    assert trajectory.failure is not None
    assert (trajectory.failure.stage, trajectory.failure.error) == ("make", "OSError: no display")


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (None, "step() returned NoneType; return a Step"),
        (Step(reward=float("nan")), "step().reward is nan"),
        (Step(reward=1e308), "step().reward is 1e+308; it must be a finite number of at most 1e+30"),
        (Step(metrics={"x": float("inf")}), "step().metrics['x'] is inf"),
        (Step([{"role": "nobody", "content": "x"}]), "step().messages[0].role is 'nobody'"),
        (Step(reward=0.5), "step().messages is empty: set is_done=True, or ask again"),
        (Step("again"), "step().messages is a str; give a list of messages"),  # type: ignore[arg-type]
    ],
)
async def test_a_step_of_another_shape_is_named(step: Any, words: str) -> None:
    class Odd(Guess):
        async def step(self, answer: Answer) -> Step:
            return step  # type: ignore[no-any-return]

    trajectory = await play(Odd())
    assert trajectory.failure is not None
    assert trajectory.failure.stage == "step"
    assert words in trajectory.failure.error


async def test_what_the_server_raises_ends_the_rollout() -> None:
    def script(prompt: str) -> str:
        if "no" in prompt:
            raise ConnectionError("the server is gone")
        return "no|"

    environment = Guess()
    trajectory = await play(environment, script)
    assert trajectory.failure is not None
    assert (trajectory.failure.stage, trajectory.failure.error) == ("sample", "ConnectionError: the server is gone")
    assert (len(trajectory.turns), environment.calls[-1]) == (1, "close")


class Hanging(ScriptedPolicy):
    """Never answers; records its cancellation."""

    is_cancelled = False

    async def sample(
        self, prompt: Sequence[Chunk], settings: SamplingSettings, stop_ids: Sequence[int], conversation: str
    ) -> Sampled:
        try:
            return await asyncio.Event().wait()  # type: ignore[return-value]
        except asyncio.CancelledError:
            self.is_cancelled = True
            raise


SHORT = RolloutSettings(deadline_s=1.0)


async def test_the_deadline_cancels_a_sample() -> None:
    policy, environment = Hanging(lambda p: "|"), Guess()
    trajectory = await play(environment, policy, SHORT)
    assert trajectory.failure is not None
    assert trajectory.failure.stage == "deadline"
    assert trajectory.failure.error == "TimeoutError: 1 s have passed in stage 'sample' of turn 0"
    assert policy.is_cancelled
    assert environment.calls == ["reset", "close"]


@pytest.mark.parametrize("stage", ["reset", "step"])
async def test_the_deadline_ends_a_hanging_environment(stage: str) -> None:
    environment = Guess(**{stage: 1000.0})
    trajectory = await play(environment, settings=SHORT)
    assert trajectory.failure is not None
    assert f"in stage '{stage}' of turn 0" in trajectory.failure.error
    assert environment.calls[-1] == "close"


async def test_a_hanging_plain_environment_is_closed_once_it_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "_CLOSE_S", 0.01)
    gate, closed = threading.Event(), threading.Event()

    class Hangs(Guess):
        def reset(self) -> Sequence[MessageLike]:  # type: ignore[override]
            gate.wait()
            return []

        def close(self) -> None:  # type: ignore[override]
            closed.set()

    trajectory = await play(Hangs(), settings=SHORT)
    assert trajectory.failure is not None
    assert trajectory.failure.stage == "deadline"
    assert not closed.is_set()
    gate.set()
    assert await asyncio.to_thread(closed.wait, 10)


async def test_an_environment_that_was_made_too_late_is_closed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "_CLOSE_S", 0.01)
    gate, environment = threading.Event(), Guess()

    def factory() -> Guess:
        gate.wait()
        return environment

    template: Any = LetterTemplate()
    trajectory = await run_rollout(ScriptedPolicy(lambda p: "|"), template, factory, SHORT, "c")
    assert trajectory.failure is not None
    assert "in stage 'make'" in trajectory.failure.error
    gate.set()
    async with asyncio.timeout(10):
        while environment.calls != ["close"]:  # noqa: ASYNC110  it is called from a thread
            await asyncio.sleep(0.01)


async def test_being_cancelled_is_passed_on_and_the_environment_closed() -> None:
    environment = Guess()
    task = asyncio.create_task(play(environment, Hanging(lambda p: "|")))
    async with asyncio.timeout(10):
        while environment.calls != ["reset"]:  # noqa: ASYNC110  it is called from a thread
            await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert environment.calls == ["reset", "close"]


async def test_a_cancellation_within_an_environment_is_its_own_failure() -> None:
    trajectory = await play(Guess(step=asyncio.CancelledError()))
    assert trajectory.failure is not None
    assert (trajectory.failure.stage, trajectory.failure.error) == ("step", "CancelledError: ")


async def test_seeds_differ_by_turn_and_conversation_and_repeat() -> None:
    policies = [ScriptedPolicy(lambda p: "no|") for _ in range(3)]
    template: Any = LetterTemplate()
    for policy, conversation in zip(policies, ("a", "a", "b"), strict=True):
        await run_rollout(policy, template, Guess, SETTINGS, conversation)
    assert policies[0].seeds == policies[1].seeds == [derived_seed(1, "a", turn) for turn in range(4)]
    assert len({*policies[0].seeds, *policies[2].seeds}) == 8
    assert all(0 <= derived_seed(seed, "x", 0) < 2**31 for seed in range(100))
    unseeded = ScriptedPolicy(lambda p: "yes|")
    await play(Guess(), unseeded, RolloutSettings())
    assert unseeded.seeds == [None]
