"""Datasets: conversations that are read on access from files, folders and Hugging Face `datasets`."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fovea.wire.errors import InvalidInput
from fovea_data.conversation import Asking, Conversation, RowReader, check_positive, naming_row
from fovea_data.rows import BLOCKS_IN_MEMORY, ImageFolder, Indices, Joined, JsonLines, Listed, Parquet, Rows

QUESTION = "What is in this picture?"
MAX_SIDE = 512
"""Default of the most pixels of a picture's longer side. It is enough for most photographs, and gives at most 400
tokens in most model families. Documents and screenshots need more."""
Convert = Callable[[Any], Mapping[str, Any]]


class Dataset:
    """Conversations by index, made by `image_folder` and `load_chats`.

    Attributes:
        indices: Rows of the source that belong to the dataset, int64 [N], ascending.
        max_side: The most pixels of a picture's longer side. Larger pictures are shrunk. None does not limit the size.
    """

    def __init__(
        self,
        rows: Rows,
        indices: Indices | None = None,
        *,
        convert: Convert | None = None,
        max_side: int | None = None,
    ) -> None:
        if max_side is not None:
            check_positive(max_side=max_side)
        self._rows, self._convert, self.max_side = rows, convert, max_side
        self.indices = np.arange(len(rows), dtype=np.int64) if indices is None else indices
        if not len(self.indices):
            raise InvalidInput("the dataset has no rows", field="rows")

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Conversation:
        """Returns a row. Raises InvalidInput, with the row's name, for a broken row; IndexError for a missing one."""
        place = int(self.indices[index])
        with naming_row(self._rows.where(place)) as where:
            row = self._rows.row(place)
            reader = RowReader(self._rows.folder(place), self.max_side)
            return reader.conversation(self._convert(row) if self._convert else row, where)

    def __iter__(self) -> Iterator[Conversation]:
        return (self[index] for index in range(len(self)))

    def split(self, held_out: float, seed: int = 0) -> tuple[Dataset, Dataset]:
        """Splits the rows at random into a dataset to train on and a held-out one.

        Args:
            held_out: Share of the held-out rows, between 0 and 1.
            seed: Seed of the draw.
        """
        count = round(len(self) * held_out)
        if not 0 < count < len(self):
            raise InvalidInput(
                f"held_out is {held_out}, which holds out {count} of {len(self)} rows; both parts need a row",
                field="held_out",
            )
        drawn = np.random.default_rng(seed).permutation(self.indices)
        train, rest = np.sort(drawn[count:]), np.sort(drawn[:count])
        return self.part(train), self.part(rest)

    def order(self, seed: int, epoch: int) -> Indices:
        """Returns the order of the rows in an epoch, int64 [N].

        Rows that are read in blocks (row groups of Parquet) are shuffled within windows of blocks that fit in memory.
        """
        rng = np.random.default_rng([seed, epoch])
        _, blocks = np.unique(self._rows.blocks(self.indices), return_inverse=True)
        windows = rng.permutation(int(blocks.max()) + 1)[blocks] // BLOCKS_IN_MEMORY
        order: Indices = np.lexsort((rng.random(len(self)), windows)).astype(np.int64)
        return order

    def where(self, index: int) -> str:
        """Returns the name of a row, such as `chats.jsonl:17`."""
        return self._rows.where(int(self.indices[index]))

    def problems(self, limit: int = 20, *, check: Callable[[Conversation], object] | None = None) -> list[str]:
        """Reads all rows and returns one line per broken row, up to a limit.

        Args:
            limit: The most lines.
            check: A further check that raises InvalidInput for a row that cannot be learnt, such as an encoder's
                `datums`.
        """
        found: list[str] = []
        for index in range(len(self)):
            try:
                row = self[index]
                if check is not None:
                    with naming_row(row.where):
                        check(row)
            except InvalidInput as error:
                found.append(error.message)
                if len(found) == limit:
                    break
        return found

    def part(self, indices: Indices) -> Dataset:
        """Returns a dataset of some of the rows, by their indices in the source: int64 [N], ascending."""
        return Dataset(self._rows, indices, convert=self._convert, max_side=self.max_side)


def image_folder(
    path: str | pathlib.Path, question: str = QUESTION, *, system_prompt: str = "", max_side: int | None = MAX_SIDE
) -> Dataset:
    """Makes a dataset of pictures in one folder per class, `path/CLASS/any.png`. The answer to each is its class.

    Args:
        path: The folder.
        question: Question about each picture.
        system_prompt: Text of a system message before each question; empty for none.
        max_side: The most pixels of a picture's longer side. Larger pictures are shrunk. None does not limit the size.

    Raises:
        NotFound: The folder does not exist.
        InvalidInput: The folder has no folders with pictures, or has a file that is not a picture.
    """
    return Dataset(ImageFolder(pathlib.Path(path), Asking(question, system_prompt).messages), max_side=max_side)


def load_chats(
    *sources: str | pathlib.Path | Sequence[Mapping[str, Any]],
    convert: Convert | None = None,
    max_side: int | None = MAX_SIDE,
) -> Dataset:
    """Makes a dataset of `.jsonl` and `.parquet` files, lists and Hugging Face datasets.

    A row is `{"prompt": text, "completion": text, "image": picture}` or `{"messages": [...]}`, as OpenAI or Hugging
    Face write them. A picture is a path, a data URL or bytes. `help(RowReader.conversation)` has the details. `convert`
    makes such a row from any other, for example from a CSV file with the columns `file` and `label`:

        rows = list(csv.DictReader(open("labels.csv")))
        load_chats(rows, convert=lambda row: {"prompt": "Which?", "completion": row["label"], "image": row["file"]})

    Args:
        sources: One or more sources, one after another. Relative paths of pictures begin at the folder of their file;
            those of a list begin at the working directory.
        convert: Returns a row in one of the formats above for a row of a source.
        max_side: The most pixels of a picture's longer side. Larger pictures are shrunk. None does not limit the size.

    Raises:
        NotFound: A file does not exist.
        InvalidInput: A source has another type. Rows are checked only when they are read.
        FailedPrecondition: A source is a Parquet file, and pyarrow is not installed.
    """
    if not sources:
        raise InvalidInput("sources is empty; give a file, a list or a Hugging Face dataset", field="sources")
    parts = [_rows(one, f"rows{number}" if number else "rows") for number, one in enumerate(sources)]
    return Dataset(parts[0] if len(parts) == 1 else Joined(parts), convert=convert, max_side=max_side)


def _rows(source: str | pathlib.Path | Sequence[Mapping[str, Any]], name: str) -> Rows:
    if not isinstance(source, (str, pathlib.Path)):
        return Listed(source, name)
    path = pathlib.Path(source)
    kinds: dict[str, Callable[[pathlib.Path], Rows]] = {".jsonl": JsonLines, ".parquet": Parquet}
    if path.suffix not in kinds:
        raise InvalidInput(
            f"{path} is not a .jsonl or .parquet file: convert it to one of the two, or read its rows (of a .csv with"
            " csv.DictReader) and give their list with `convert`",
            field="path",
        )
    return kinds[path.suffix](path)
