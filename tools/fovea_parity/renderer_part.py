"""Compares the renderer with the checkpoint's own processor: ids and tensors must be equal to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image
from transformers import BatchFeature

from fovea_parity.documents import SIZES, Content, Document, DocumentMaker, picture
from fovea_parity.finding import Finding

_TEXT = "What is in this picture?"
_MORE = " And in that one? "
_LAYOUT_COUNT = 5
"""The number of layouts that `_layouts` returns."""

_LINES = "Line.\n"
"""A text that ends with a line feed. Some processors write line feeds around an image, and the tokenizer merges
adjacent line feeds into one token."""


def check(directory: Path) -> Finding:
    """Checks ten sizes, with one and two images, at the start and at the end of a text."""
    maker = DocumentMaker(directory)
    if maker.family is None:
        text = [_TEXT + _MORE]
        same = maker.splice(text).ids.tolist() == maker.own(text)["input_ids"][0].tolist()
        return Finding("renderer", same, "text only: ids equal" if same else "ids of a text differ")
    found = [problem for size in SIZES for problem in _problems(maker, size)]
    if found:
        return Finding("renderer", False, f"{len(found)} of {_LAYOUT_COUNT * len(SIZES)} inputs differ; {found[0]}")
    said = f"ids and tensors equal: {len(SIZES)} sizes, one and two images, first and last, between line feeds"
    return Finding("renderer", True, said, {"sizes": len(SIZES)})


def _problems(maker: DocumentMaker, size: tuple[int, int]) -> Iterator[str]:
    first, second = picture(size, 1), picture(size[::-1], 2)
    for name, contents in _layouts(first, second).items():
        document = maker.splice(contents)
        images = document.images
        # uint8 pixels are compared with the processor's output before it rescales and normalises.
        is_bytes = any(array.dtype == np.uint8 for array in images[0].tensors.values())
        how = {"do_rescale": False, "do_normalize": False} if is_bytes else {}
        own = maker.own(contents, **how)
        problem = _ids_problem(document, own)
        if not problem and len(images) == 1:
            problem = _tensors_problem(images[0].tensors, own)
        if problem:
            yield f"{size[0]}x{size[1]}, {name}: {problem}"


def _layouts(first: Image.Image, second: Image.Image) -> dict[str, list[Content]]:
    return {
        "image first": [first, _TEXT],
        "image last": [_TEXT, first],
        "two images": [_TEXT, first, _MORE, second, _TEXT],
        "two in a row": [first, second, _TEXT],
        "between line feeds": [_LINES, first, f"\n{_LINES}", second, f"\n\n{_LINES}"],
    }


def _ids_problem(document: Document, own: BatchFeature) -> str:
    ids, expected = document.ids, own["input_ids"][0].numpy()
    if len(ids) != len(expected):
        return f"{len(ids)} ids, its own processor makes {len(expected)}"
    if (ids != expected).any():
        at = int(np.flatnonzero(ids != expected)[0])
        return f"id {at} is {ids[at]}, its own processor makes {expected[at]}"
    return ""


def _tensors_problem(tensors: dict[str, npt.NDArray[Any]], own: BatchFeature) -> str:
    for name, array in tensors.items():
        if name not in own:
            return f"its own processor has no tensor {name}"
        expected = own[name].numpy()
        if name == "input_ids":  # only the ids of the image, which `_ids_problem` has compared
            continue
        if array.shape != expected.shape or not np.array_equal(array, expected.astype(array.dtype)):
            return f"tensor {name} {list(array.shape)} is not its own processor's {list(expected.shape)}"
    return ""
