"""Raw rows by index. They are read from disk on access, so that memory holds only the rows in use."""

from __future__ import annotations

import json
import pathlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from fovea.wire.errors import FailedPrecondition, InvalidInput, NotFound

Indices = npt.NDArray[np.int64]

BLOCKS_IN_MEMORY = 8
"""Number of blocks of rows that are shuffled with one another and held in memory."""

PICTURE_SUFFIXES = {
    ".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif", ".heic", ".heif"
}  # fmt: skip
"""Suffixes of files that are read as pictures. The reader refuses those that Pillow cannot decode."""


class Rows(ABC):
    """Rows of a dataset, with their names in errors."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def row(self, index: int) -> Any:
        """Returns a row. Raises InvalidInput, which names the row, if it cannot be read."""

    @abstractmethod
    def where(self, index: int) -> str:
        """Returns the name of a row, such as `chats.jsonl:17`."""

    def folder(self, index: int) -> pathlib.Path | None:
        """Returns the folder of a row's relative paths; None is the working directory."""
        return None

    def blocks(self, indices: Indices) -> Indices:
        """Returns the number of the block that contains each row, int64 [N]. By default there is one block."""
        return np.zeros(len(indices), np.int64)


class JsonLines(Rows):
    """A file with one JSON object per line. Memory holds only the offset and the number of each line."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = _existing(path)
        offsets, numbers, offset = [], [], 0
        with self._path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    offsets.append(offset)
                    numbers.append(number)
                offset += len(line)
        self._offsets, self._numbers = np.array(offsets, np.int64), np.array(numbers, np.int64)

    def __len__(self) -> int:
        return len(self._offsets)

    def row(self, index: int) -> Any:
        with self._path.open("rb") as lines:
            lines.seek(int(self._offsets[index]))
            line = lines.readline()
        try:
            return json.loads(line)
        except ValueError as error:
            where = self.where(index)
            raise InvalidInput(f"{where}: the line is not JSON: {error}", field=where) from None

    def where(self, index: int) -> str:
        return f"{self._path}:{self._numbers[index]}"

    def folder(self, index: int) -> pathlib.Path:
        return self._path.parent


class Parquet(Rows):
    """A Parquet file. A few of its row groups are in memory. Rows are counted from 1 in errors."""

    def __init__(self, path: pathlib.Path) -> None:
        try:
            import pyarrow  # type: ignore[import-not-found, import-untyped]
            import pyarrow.parquet  # type: ignore[import-not-found, import-untyped]
        except ImportError:
            raise FailedPrecondition(f"{path} needs pyarrow: install it, or convert the file to .jsonl") from None
        self._path = _existing(path)
        try:
            self._file = pyarrow.parquet.ParquetFile(self._path)
        except pyarrow.ArrowInvalid as error:
            raise InvalidInput(f"{path} is not a Parquet file: {error}", field="path") from None
        counts = [self._file.metadata.row_group(group).num_rows for group in range(self._file.num_row_groups)]
        self._ends = np.cumsum(counts, dtype=np.int64)
        self._group = lru_cache(maxsize=BLOCKS_IN_MEMORY)(self._file.read_row_group)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def row(self, index: int) -> Any:
        (group,) = self.blocks(np.array([index])).tolist()
        begin = int(self._ends[group - 1]) if group else 0
        return self._group(group).slice(index - begin, 1).to_pylist()[0]

    def where(self, index: int) -> str:
        return f"{self._path}:{index + 1}"

    def folder(self, index: int) -> pathlib.Path:
        return self._path.parent

    def blocks(self, indices: Indices) -> Indices:
        return np.searchsorted(self._ends, indices, side="right").astype(np.int64)


class Listed(Rows):
    """Rows of a list, or of a Hugging Face `datasets.Dataset`, which maps its files into memory."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], name: str) -> None:
        if not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__"):
            raise InvalidInput(
                f"{name} is a {type(rows).__name__}, which can only be read in order: write it to a .jsonl or"
                " .parquet file, from which rows are read in any order",
                field=name,
            )
        self._rows, self._name = rows, name

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> Any:
        return self._rows[index]

    def where(self, index: int) -> str:
        return f"{self._name}[{index}]"


class ImageFolder(Rows):
    """Pictures in one folder per class: a row is `{"prompt": messages, "completion": the folder's name}`.

    `ask` makes the messages from the path of a picture. Underscores in a folder's name become blanks. Files that are
    not pictures, folders inside the folder of a class, and pictures outside these folders are refused. Hidden files are
    ignored.
    """

    def __init__(self, folder: pathlib.Path, ask: Callable[[pathlib.Path], list[dict[str, Any]]]) -> None:
        if folder.is_file():
            raise InvalidInput(
                f"{folder} is a file: give a folder with a folder of pictures per class. load_chats reads a .jsonl or"
                " .parquet file, and with `convert` the rows of a .csv",
                field="path",
            )
        if not folder.is_dir():
            raise NotFound(f"the folder {folder} does not exist", field="path")
        self._ask = ask
        seen = sorted(one for one in folder.iterdir() if not one.name.startswith("."))
        classes = [one for one in seen if one.is_dir()]
        self._files = [file for one in classes for file in sorted(one.iterdir()) if not file.name.startswith(".")]
        if not self._files:
            raise InvalidInput(
                f"{folder} has no folders with pictures: put the pictures of each class into a folder with its name",
                field="path",
            )
        if deep := [file for file in self._files if file.is_dir()]:
            raise InvalidInput(
                f"{deep[0]} is a folder inside the folder of a class, which may contain pictures only: give"
                f" {deep[0].parent} if its folders are the classes, or else move the pictures up",
                field=str(deep[0]),
            )
        if odd := [file for file in self._files if not _is_picture(file)]:
            raise InvalidInput(f"{odd[0]} is not a picture: remove it from the folder", field=str(odd[0]))
        if beside := [file for file in seen if file.is_file() and _is_picture(file)]:
            raise InvalidInput(
                f"{len(beside)} pictures have no class, because they are outside the folders of the classes; the first"
                f" is {beside[0]}: move each into the folder of its class, or out of {folder}",
                field=str(beside[0]),
            )

    def __len__(self) -> int:
        return len(self._files)

    def row(self, index: int) -> Any:
        file = self._files[index]
        return {"prompt": self._ask(file.resolve()), "completion": file.parent.name.replace("_", " ")}

    def where(self, index: int) -> str:
        return str(self._files[index])


class Joined(Rows):
    """Rows of several sources, one after another."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self._parts = parts
        self._ends = np.cumsum([len(part) for part in parts], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def row(self, index: int) -> Any:
        part, place = self._place(index)
        return self._parts[part].row(place)

    def where(self, index: int) -> str:
        part, place = self._place(index)
        return self._parts[part].where(place)

    def folder(self, index: int) -> pathlib.Path | None:
        part, place = self._place(index)
        return self._parts[part].folder(place)

    def blocks(self, indices: Indices) -> Indices:
        found = np.zeros(len(indices), np.int64)
        begin = first = 0
        for part, end in zip(self._parts, self._ends.tolist(), strict=True):
            inside = (indices >= begin) & (indices < end)
            found[inside] = first + part.blocks(indices[inside] - begin)
            first += int(part.blocks(np.array([len(part) - 1])).max()) + 1 if len(part) else 0
            begin = end
        return found

    def _place(self, index: int) -> tuple[int, int]:
        part = int(np.searchsorted(self._ends, index, side="right"))
        return part, index - (int(self._ends[part - 1]) if part else 0)


def _is_picture(file: pathlib.Path) -> bool:
    return file.suffix.lower() in PICTURE_SUFFIXES


def _existing(path: pathlib.Path) -> pathlib.Path:
    if not path.is_file():
        raise NotFound(f"{path} does not exist", field="path")
    return path
