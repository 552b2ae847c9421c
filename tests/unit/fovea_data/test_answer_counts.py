"""The confusion matrix of held-out rows."""

import pytest

from fovea_data.answer_counts import AnswerCounts


def test_answers_are_counted_by_label() -> None:
    pairs = [("one", "one "), ("one", "seven"), ("seven", "seven"), ("seven", "a seven"), ("seven", " seven")]
    counts = AnswerCounts.of(pairs)
    assert counts == AnswerCounts(("one", "seven"), ((1, 1, 0), (0, 2, 1)))
    assert str(counts) == "  one: 1 of 2 right, 1 as seven\n  seven: 2 of 3 right, 1 as no label"


def test_a_label_equals_an_answer_in_another_unicode_form() -> None:
    counts = AnswerCounts.of([("caf\u00e9", "cafe\u0301"), ("bar", "bar")] * 2)
    assert counts == AnswerCounts(("bar", "caf\u00e9"), ((2, 0, 0), (0, 2, 0)))


@pytest.mark.parametrize(
    "labels",
    [
        [],
        ["yes"] * 8,
        ["7 birds", "a bus", "no"],
        [str(number) for number in range(33)] * 4,
        ["yes", "x" * 65] * 4,
    ],
    ids=["none", "one", "texts", "too many", "long"],
)
def test_right_answers_that_are_no_labels_have_no_counts(labels: list[str]) -> None:
    assert AnswerCounts.of((label, "yes") for label in labels) is None


def test_the_largest_matrix_has_32_labels_of_64_characters() -> None:
    labels = [f"{number:064}" for number in range(32)]
    counts = AnswerCounts.of(zip(labels * 2, labels[1:] * 2 + labels[:2], strict=True))
    assert counts is not None
    assert len(counts.labels) == 32
    assert [len(row) for row in counts.counts] == [33] * 32
