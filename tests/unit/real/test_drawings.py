"""Drawings depend on their numbers alone, and rules mark the answers about them."""

import numpy as np
import pytest

from fovea_real.drawings import CAPTION_QUESTIONS, PLACES, TASKS, Question, drawing, facts, marks, summary


@pytest.mark.parametrize("task", TASKS)
def test_a_right_answer_has_every_mark(task: str) -> None:
    kinds = set()
    for index in range(60):
        one = drawing(3, "train", index, side=64, tasks=(task,))
        assert one.pixels.shape == (64, 64, 3)
        assert one.questions[0].kind == "caption"
        assert one.questions[0].text in CAPTION_QUESTIONS
        assert len(facts(one.questions[0].answer)) >= 2
        for question in one.questions:
            kinds.add(question.kind)
            assert all(all(found) for found in marks(question, question.answer).values()), question
            assert not all(all(found) for found in marks(question, "I do not know.").values()), question
    assert len(kinds) >= 3


def test_a_drawing_depends_on_seed_split_and_index_alone() -> None:
    one, again = (drawing(0, "train", 7) for _ in range(2))
    assert np.array_equal(one.pixels, again.pixels)
    assert (one.questions, one.things) == (again.questions, again.things)
    for other in (drawing(1, "train", 7), drawing(0, "held-out", 7), drawing(0, "train", 8)):
        assert other.questions != one.questions or not np.array_equal(other.pixels, one.pixels)


def test_the_things_of_a_drawing_are_where_its_caption_says() -> None:
    for index in range(40):
        one = drawing(5, "train", index, tasks=("shapes",))
        told = facts(one.questions[0].answer)
        for thing in one.things:
            x, y = (thing.box[0] + thing.box[2]) / 2, (thing.box[1] + thing.box[3]) / 2
            place = PLACES[int(y / 256 * 3) * 3 + int(x / 256 * 3)]
            assert (told["colour", place], told["shape", place]) == (thing.colour, thing.word)
        assert told["count", ""] == str(len(one.things))


def test_a_caption_loses_a_mark_for_each_wrong_missing_and_invented_fact() -> None:
    right = "There are 2 shapes: a red circle at the top left and an orange star on the right."
    asked = Question("caption", "What do you see?", right)
    assert summary([marks(asked, right)])["captions"] == 1.0
    blue = marks(asked, right.replace("red", "blue"))
    assert blue["caption: colour"].count(False) == 1
    assert blue["whole caption"] == [False]
    assert summary([blue])["captions"] == pytest.approx(6 / 7, abs=1e-4)
    missing = marks(asked, "There is 1 shape: a red circle at the top left.")
    assert sum(found.count(False) for kind, found in missing.items() if kind.startswith("caption: ")) == 4
    invented = marks(asked, right[:-1] + ", and a pink ring at the bottom.")
    assert sum(found.count(False) for kind, found in invented.items() if kind.startswith("caption: ")) == 3


def test_a_short_answer_counts_as_a_whole() -> None:
    asked = Question("place", "Where is the red circle?", "at the top left")
    assert marks(asked, " At the top left. ") == {"place": [True]}
    assert marks(asked, "at the top") == {"place": [False]}
    assert summary([marks(asked, "at the top left"), marks(asked, "")]) == {"place": 0.5, "short answers": 0.5}
