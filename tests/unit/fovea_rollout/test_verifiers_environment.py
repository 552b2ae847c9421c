"""Real environments of `verifiers`, where it is installed (make environments)."""

import importlib.util
from typing import Any

import numpy as np
import pytest

from fovea.wire.errors import FailedPrecondition, InvalidInput
from fovea_rollout.environments.environment import Answer, read_answer
from fovea_rollout.environments.verifiers_environment import VerifiersEnvironment, verifiers_sources, verifiers_tools
from fovea_rollout.messages import Message, Picture
from fovea_rollout.policies.policy import SamplingSettings
from fovea_rollout.rollout import RolloutSettings, run_rollouts
from fovea_rollout.trajectory import Trajectory
from tests.unit.fovea_rollout.scripted import LetterTemplate, ScriptedPolicy

IS_HERE = importlib.util.find_spec("verifiers") is not None
real = pytest.mark.skipif(not IS_HERE, reason="verifiers is installed in a separate environment")
SETTINGS = RolloutSettings(SamplingSettings(max_tokens=16), max_turns=6)
SQUARE = Picture.of_pixels(np.full((32, 32, 3), 200, np.uint8))


def rubric(*functions: Any) -> Any:
    import verifiers as vf  # type: ignore[import-not-found]

    return vf.Rubric(funcs=list(functions))


def rows(*entries: dict[str, Any]) -> Any:
    from datasets import Dataset  # type: ignore[import-not-found]

    return Dataset.from_list(list(entries))


async def said_it(completion: Any, answer: str) -> float:
    return float(completion[-1]["content"].strip() == answer)


def single_turn() -> Any:
    import verifiers as vf

    questions = rows({"question": "2+2?", "answer": "4"}, {"question": "2+3?", "answer": "5"})
    return vf.SingleTurnEnv(dataset=questions, system_prompt="Add.", rubric=rubric(said_it))


def guessing() -> Any:
    """Says whether a number is higher, with a picture each time."""
    import verifiers as vf

    class Guessing(vf.MultiTurnEnv):  # type: ignore[misc]
        async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
            guess, truth = messages[-1]["content"].strip(), state["answer"]
            if guess == truth:
                state["final_env_response"] = [{"role": "user", "content": "Right."}]
                return state["final_env_response"]
            if guess == "?":
                raise vf.Error("no number")
            hint = "higher" if guess < truth else "lower"
            shown = {"type": "image_url", "image_url": {"url": SQUARE.data_uri}}
            return [{"role": "user", "content": [shown, {"type": "text", "text": hint}]}]

    async def found(state: Any) -> float:
        return float(state.get("final_env_response") is not None)

    shown = {"type": "image_url", "image_url": {"url": SQUARE.data_uri}}
    prompt = [{"role": "user", "content": [shown, {"type": "text", "text": "A number from 0 to 9?"}]}]
    return Guessing(dataset=rows({"prompt": prompt, "answer": "3"}), max_turns=4, rubric=rubric(found))


async def play(env: Any, script: Any, **options: Any) -> list[Trajectory]:
    sources = verifiers_sources(env, **options)
    return await run_rollouts(ScriptedPolicy(script), LetterTemplate(), sources, SETTINGS)


@pytest.mark.skipif(IS_HERE, reason="verifiers is installed")
async def test_without_verifiers_the_message_says_so() -> None:
    with pytest.raises(FailedPrecondition, match="install verifiers"):
        await VerifiersEnvironment(object(), {}).reset()


@real
async def test_a_single_turn_is_the_prompt_and_the_rubrics_reward() -> None:
    played = await play(single_turn(), lambda _: "4|")
    assert [one.failure for one in played] == [None, None]
    assert [one.reward for one in played] == [1.0, 0.0]
    assert [message.role for message in played[0].turns[0].new_messages] == ["system", "user"]
    assert played[1].turns[0].new_messages[1].text == "2+3?"
    assert played[0].turns[0].metrics["said_it"] == 1.0


@real
async def test_feedback_comes_with_its_picture_until_the_environment_ends_it() -> None:
    (trajectory,) = await play(guessing(), lambda read: "3|" if "lower" in read else "5|")
    assert trajectory.failure is None
    assert trajectory.end == "done"
    assert trajectory.reward == 1.0
    assert [turn.new_messages for turn in trajectory.turns] == [
        (Message("user", (SQUARE, "A number from 0 to 9?")),),
        (Message("user", (SQUARE, "lower")),),
    ]
    assert trajectory.prefix_breaks == 0
    assert trajectory.turns[-1].metrics["num_turns"] == 2.0


@real
async def test_its_own_limit_of_turns_ends_it_without_reward() -> None:
    (trajectory,) = await play(guessing(), lambda _: "1|")
    assert trajectory.end == "done"
    assert len(trajectory.turns) == 4
    assert trajectory.reward == 0.0


@real
async def test_an_empty_answer_is_no_error() -> None:
    played = await play(single_turn(), lambda _: "|")
    assert [(one.failure, one.reward) for one in played] == [(None, 0.0)] * 2


@real
async def test_an_error_of_the_environment_is_the_rollouts_failure() -> None:
    (trajectory,) = await play(guessing(), lambda _: "?|")
    assert trajectory.failure is not None
    assert trajectory.failure.stage == "step"
    assert "no number" in trajectory.failure.traceback


@real
async def test_an_episode_that_is_broken_off_is_cancelled() -> None:
    environment = VerifiersEnvironment((env := guessing()), env.get_dataset()[0])
    await environment.reset()
    await environment.close()
    assert environment._episode is not None
    assert environment._episode.cancelled()


@real
async def test_a_tool_is_called_and_its_result_is_read() -> None:
    import verifiers as vf

    def double(number: int) -> int:
        """Returns twice a number."""
        return number * 2

    env = vf.ToolEnv(
        tools=[double], dataset=rows({"question": "Twice 21?", "answer": "42"}), rubric=rubric(said_it), max_turns=3
    )
    (tool,) = verifiers_tools(env)
    assert tool["function"]["name"] == "double"
    assert set(tool["function"]["parameters"]["properties"]) == {"number"}
    environment = VerifiersEnvironment(env, env.get_dataset()[0])
    await environment.reset()
    call = 'Let me see. <tool_call>{"name": "double", "arguments": {"number": 21}}</tool_call>'
    step = await environment.step(read_answer(call, is_cut=False))
    assert step.messages == [{"role": "tool", "tool_call_id": "call_0", "content": "42"}]
    step = await environment.step(Answer("42"))
    assert step.is_done
    assert step.reward == 1.0
    await environment.close()


@real
def test_rubrics_that_compare_a_group_are_refused() -> None:
    async def best(states: Any) -> list[float]:
        return [1.0 for _ in states]

    import verifiers as vf

    env = vf.SingleTurnEnv(dataset=rows({"question": "?", "answer": ""}), rubric=rubric(best))
    with pytest.raises(InvalidInput, match="groups"):
        VerifiersEnvironment(env, {})


@real
async def test_rows_for_evaluation_and_their_number() -> None:
    env = single_turn()
    assert len(verifiers_sources(env, count=1)) == 1
    assert len(verifiers_sources(env, is_held_out=True)) == 2
