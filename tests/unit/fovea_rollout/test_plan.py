"""Long conversations, made turn by turn from windows: the same prompts as rendered whole."""

from __future__ import annotations

import random
from typing import Any

import pytest

from fovea_rollout.messages import Message, Part
from fovea_rollout.policy import Sampled
from fovea_rollout.template import ChatTemplate
from tests.unit.fovea_rollout import chat_templates as chat
from tests.unit.fovea_rollout.chat_templates import sampled, square, tokenizer, user

RED = square(255, 0, 0)
THINKING = ["released/qwen3", "released/qwen3_vl_thinking"]
History = list[Message | Sampled]


def grown_and_whole(name: str, history: History, **arguments: Any) -> None:
    """Renders every prompt of a conversation, and the last ones anew."""
    template = ChatTemplate(tokenizer(name), **arguments)
    turns = [index for index, one in enumerate(history) if isinstance(one, Sampled)]
    prompts = [(end, template.render(history[:end])) for end in [*turns, len(history)]]
    for end, prompt in prompts[11:]:
        # A template that has seen nothing of the conversation has to render it whole.
        assert prompt == ChatTemplate(tokenizer(name), **arguments).render(history[:end])


def turn(name: str, index: int, thinking: bool, is_ended: bool = True) -> Sampled:
    text = f"<think>\nhm {index}\n</think>\n\nanswer {index}" if thinking else f"answer {index}"
    opening = "<think>\n" if name == "released/qwen3_vl_thinking" else ""
    return sampled(name, text.removeprefix(opening) + "<|im_end|>" * is_ended)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", chat.NAMES)
def test_a_mixed_conversation(name: str, seed: int) -> None:
    chance = random.Random(seed)
    history: History = [Message("system", ("Be brief",)), user("Begin")]
    for index in range(40):
        history.append(turn(name, index, chance.random() < 0.4, chance.random() < 0.8))
        for _ in range(chance.choice([1, 1, 2])):
            parts: list[Part] = [f"step {index}"]
            if name not in chat.TEXT_ONLY and chance.random() < 0.5:
                parts.append(RED)
            tool = name not in chat.WITHOUT_TOOLS and chance.random() < 0.8
            history.append(Message("tool" if tool else "user", tuple(parts)))
    grown_and_whole(name, history)


@pytest.mark.parametrize("thinking", [{0}, {0, 15}, {3}, set(range(20))], ids=str)
@pytest.mark.parametrize("name", THINKING)
def test_a_question_after_a_long_chain_of_tools_strips_all_of_it(name: str, thinking: set[int]) -> None:
    history: History = [user("Begin")]
    for index in range(20):
        history += [turn(name, index, index in thinking), Message("tool", (f"result {index}",))]
    history += [turn(name, 20, thinking=False), user("Next")]
    for index in range(21, 30):
        history += [turn(name, index, index % 2 == 0), Message("tool", (f"result {index}",))]
    grown_and_whole(name, history)


def test_numbered_pictures_keep_their_numbers() -> None:
    name = "released/qwen3_vl_instruct"
    history: History = [user("Begin", RED)]
    for index in range(40):
        history += [turn(name, index, thinking=False), user(RED)]
    grown_and_whole(name, history, add_vision_id=True)
    prompt = ChatTemplate(tokenizer(name), add_vision_id=True).render(history)
    assert "Picture 41: <|vision_start|>" in chat.text_of(name, prompt)


def test_a_conversation_may_go_on_from_where_another_did() -> None:
    name = "released/qwen3_vl_instruct"
    template = ChatTemplate(tokenizer(name))
    shared: History = [user("Begin")]
    for index in range(15):
        template.render(shared)
        shared += [turn(name, index, thinking=False), user(f"step {index}")]
    for branch in ("left", "right"):
        history = [*shared, turn(name, 99, thinking=True), user(branch)]
        assert template.render(history) == ChatTemplate(tokenizer(name)).render(history)


def test_a_template_that_looks_far_back_is_rendered_whole_once_that_shows() -> None:
    """It leaves out answers' tools but the last ten, which no window can tell."""
    loaded = tokenizer("tiny/qwen3_vl")
    forgetful = ChatTemplate(
        loaded,
        chat_template=(
            "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
            "{{ message.content if message.role != 'tool' or loop.revindex < 20 else '...' }}{{ '<|im_end|>\n' }}"
            "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
        ),
    )
    history: History = [user("Begin")]
    for index in range(40):
        prompt = forgetful.render(history)
        history += [turn("tiny/qwen3_vl", index, thinking=False), Message("tool", (f"result {index}",))]
    assert "result 28" not in chat.text_of("tiny/qwen3_vl", prompt)
    assert "result 30" in chat.text_of("tiny/qwen3_vl", prompt)
