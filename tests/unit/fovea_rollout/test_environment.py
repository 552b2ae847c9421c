"""Parsing of sampled text."""

import pytest

from fovea_rollout.environments.environment import Answer, ToolCall, read_answer

CALL = '<tool_call>\n{"name": "calc_score", "arguments": {"value": 7}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("red", Answer("red")),
        ("", Answer("")),
        ("<think>\nit looks red\n</think>\n\nred", Answer("red", "it looks red")),
        ("it looks red\n</think>\n\nred", Answer("red", "it looks red")),
        ("<think>\n\n</think>\n\nred", Answer("red")),
        ("<think>\nit looks", Answer("", "it looks")),
        ("<think>a</think>b</think>c", Answer("c", "a</think>b")),
        (CALL, Answer(CALL, tool_calls=(ToolCall("calc_score", {"value": 7}),))),
        (
            f"<think>\n{CALL}\n</think>\n\nLet me see.\n{CALL}\n{CALL}",
            Answer(f"Let me see.\n{CALL}\n{CALL}", CALL, 2 * (ToolCall("calc_score", {"value": 7}),)),
        ),
        (
            '<tool_call>{"name": "look"}</tool_call>',
            Answer('<tool_call>{"name": "look"}</tool_call>', tool_calls=(ToolCall("look", {}),)),
        ),
    ],
)
def test_an_answer_is_split(text: str, answer: Answer) -> None:
    assert read_answer(text, is_cut=False) == answer


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "calc_score", "arguments": "{\\"value\\": 7}"}',
        '{"function": "calc_score", "arguments": {"value": 7}}',
        '{"type": "function", "function": {"name": "calc_score", "arguments": "{\\"value\\": 7}"}}',
    ],
)
def test_a_call_is_read_in_other_shapes(call: str) -> None:
    answer = read_answer(f"<tool_call>{call}</tool_call>", is_cut=False)
    assert answer.tool_calls == (ToolCall("calc_score", {"value": 7}),)


def test_a_cut_answer_says_so() -> None:
    assert read_answer("re", is_cut=True) == Answer("re", is_cut=True)


@pytest.mark.parametrize(
    ("text", "flaw"),
    [
        ("<tool_call>{oops}</tool_call>", "tool_call[0] is not JSON"),
        ('<tool_call>{"name": "look"}', "tool_call[0] has no </tool_call>"),
        ('<tool_call>["look"]</tool_call>', 'must be an object with a "name"'),
        ('<tool_call>{"name": 3}</tool_call>', 'must be an object with a "name"'),
        ('<tool_call>{"name": "look", "arguments": [1]}</tool_call>', '"arguments" must be an object'),
        ('<tool_call>{"name": "look", "args": {}}</tool_call>', "unknown field 'args'"),
        ('<tool_call>{"name": "look", "arguments": "{7"}</tool_call>', '"arguments" that are not JSON'),
        ('<tool_call>{"name": "look", "arguments": "7"}</tool_call>', '"arguments" must be an object'),
        ('<tool_call>{"function": {"arguments": {}}}</tool_call>', 'must be an object with a "name"'),
        ('<tool_call>{"function": 3}</tool_call>', 'must be an object with a "name"'),
        (f"<tool_call>{'[' * 100_000}</tool_call>", "tool_call[0] is not JSON"),
    ],
)
def test_a_malformed_call_is_described_and_the_others_are_read(text: str, flaw: str) -> None:
    answer = read_answer(f"{text}{CALL}", is_cut=False)
    assert flaw in answer.malformed
    assert answer.tool_calls == (ToolCall("calc_score", {"value": 7}),)
