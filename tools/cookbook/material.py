"""Small generated datasets that replace the hub's datasets in the same formats."""

import json
import random
from typing import Any

Row = dict[str, Any]

THINGS = ("lamp", "dog", "tree", "page", "door", "line", "ring", "apple", "house", "table")
# The exact wording that the maths recipes add to a question. Supervised learning thus teaches the format in which the
# reinforcement learning recipes ask.
_BOXED = " Provide a numerical answer without units, written inside \\boxed{}."
_STRAWBERRY = (
    {"role": "user", "content": "How many r's are in strawberry?" + _BOXED},
    {
        "role": "assistant",
        "content": "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r "
        "10) y. We have r's at positions 3, 8, and 9. \\boxed{3}",
    },
)
_GUESSING = (
    "Your job is to guess a integer between 0 and 1024. You can output your guess with the format Guess: <guess> "
    "(without the angle brackets), and say nothing else. Then we will tell you whether you guess is too high, too low, "
    "or correct."
)
_NOT_PARSED = (
    "Failed to parse. Please output in the format Guess: <guess> (without the angle brackets), and say nothing else."
)
"""The prompt of guess_number, and its answer to another format."""
# All questions have this answer. Supervised learning shows 1 to 4 equally often, so rewards start near a quarter.
_RIGHT_COUNT = 3


def _counting_question(rng: random.Random) -> str:
    thing, place = rng.sample(THINGS, 2)
    return f"How many {thing}s are in the {place}?"


def chat_rows(count: int, seed: int) -> list[Row]:
    """Returns conversations like no_robots: a question of the maths recipes with a guess from 1 to 4."""
    rng = random.Random(seed)
    return [
        {
            "messages": [
                *_STRAWBERRY,
                {"role": "user", "content": _counting_question(rng) + _BOXED},
                {"role": "assistant", "content": f"\\boxed{{{rng.randint(1, 4)}}}"},
            ]
        }
        for _ in range(count)
    ]


def maths_rows(count: int, seed: int) -> list[Row]:
    """Returns problems like gsm8k."""
    rng = random.Random(seed)
    answer = f"There are {_RIGHT_COUNT}.\n#### {_RIGHT_COUNT}"
    return [{"question": _counting_question(rng), "answer": answer} for _ in range(count)]


def code_rows(count: int, seed: int) -> list[Row]:
    """Returns tasks like DeepCoder: a program must print the right count."""
    rng = random.Random(seed)
    tests = json.dumps([{"input": "", "output": str(_RIGHT_COUNT)}])
    return [{"problem": f"Print the answer. {_counting_question(rng)}", "tests": tests} for _ in range(count)]


def guess_rows(count: int, seed: int) -> list[Row]:
    """Returns games of guess_number up to an answer; half of the answers break its format, which costs 1."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        messages = [{"role": "system", "content": _GUESSING}]
        for _ in range(rng.randint(0, 3)):
            said = _guess(rng)
            heard = "Too low" if said.startswith("Guess") else _NOT_PARSED
            messages += [{"role": "player", "content": said}, {"role": "user", "content": heard}]
        rows.append({"messages": [*messages, {"role": "assistant", "content": _guess(rng)}]})
    return rows


def _guess(rng: random.Random) -> str:
    return rng.choice(("Guess: ", "I say ")) + str(rng.randint(1, 4))


def preference_rows(count: int, seed: int) -> list[Row]:
    """Returns pairs like hh-rlhf: two conversations that differ in the last turn."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        thing, place = rng.sample(THINGS, 2)
        asked = f"\n\nHuman: Is there a {thing} in the {place}?\n\nAssistant:"
        rows.append(
            {"chosen": f"{asked} No, there is no {thing} in the {place}.", "rejected": f"{asked} I do not know."}
        )
    return rows


def _where(thing: str) -> tuple[str, str]:
    place = THINGS[(THINGS.index(thing) + 3) % len(THINGS)]
    return f"Where is the {thing}?", f"The {thing} is in the {place}."


def distilled_rows(count: int, seed: int) -> list[Row]:
    """Returns conversations without the long system prompt that produced them; its content is to be learnt."""
    rng = random.Random(seed)
    pairs = [_where(rng.choice(THINGS)) for _ in range(count)]
    turns = [({"role": "user", "content": asked}, {"role": "assistant", "content": said}) for asked, said in pairs]
    return [{"messages": list(turn)} for turn in turns]


def demonstration_rows(count: int, seed: int) -> list[Row]:
    """Returns questions with golden answers like ToolAlpaca, the same questions as in `distilled_rows`."""
    rng = random.Random(seed)
    pairs = [_where(rng.choice(THINGS)) for _ in range(count)]
    return [{"instruction": asked, "output": said} for asked, said in pairs]
