"""Counts of answers by label: the confusion matrix of a model that answers with one of a few labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from fovea_data.conversation import normalised

_MOST_LABELS = 32
_MOST_CHARACTERS = 64


@dataclass(frozen=True)
class AnswerCounts:
    """Numbers of rows by label and answer.

    Attributes:
        labels: The right answers that occur, sorted.
        counts: Numbers of rows, [labels, labels + 1]: a row for each label, a column for each answer. The last column
            counts the answers that are no label.
    """

    labels: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, pairs: Iterable[tuple[str, str]]) -> AnswerCounts | None:
        """Counts pairs of label and answer, which are equal in the sense of `exact_match`.

        Returns:
            The counts; None unless there are 2 to 32 labels, of at most 64 characters, with two rows each on average.
            Longer or more varied right answers are texts rather than labels.
        """
        found = Counter((normalised(label).strip(), normalised(answer).strip()) for label, answer in pairs)
        rows_of = Counter[str]()
        for (label, _), count in found.items():
            rows_of[label] += count
        labels = sorted(rows_of)
        if not 2 <= len(labels) <= _MOST_LABELS or rows_of.total() < 2 * len(labels):
            return None
        if any(len(label) > _MOST_CHARACTERS for label in labels):
            return None
        among = [[found[label, answer] for answer in labels] for label in labels]
        others = [rows_of[label] - sum(row) for label, row in zip(labels, among, strict=True)]
        return cls(tuple(labels), tuple((*row, other) for row, other in zip(among, others, strict=True)))

    def __str__(self) -> str:
        """Returns a line for each label: `  seven: 6 of 9 right, 2 as one, 1 as no label`."""
        names = [*self.labels, "no label"]
        lines = []
        for at, (label, row) in enumerate(zip(self.labels, self.counts, strict=True)):
            wrong = [
                f", {count} as {name}"
                for to, (name, count) in enumerate(zip(names, row, strict=True))
                if count and to != at
            ]
            lines.append(f"  {label}: {row[at]} of {sum(row)} right{''.join(wrong)}")
        return "\n".join(lines)
