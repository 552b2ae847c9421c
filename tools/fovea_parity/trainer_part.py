"""Compares the trainer's forward of packed documents with transformers' own forward of one document at a time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, BatchFeature

from fovea.api.v1 import model_input_pb2
from fovea.wire.rendered_input import ImageSpan
from fovea.wire.tensors import tensors_sha256
from fovea_data.base_model import trained_part
from fovea_parity.documents import Content, Document, DocumentMaker, picture
from fovea_parity.finding import Finding
from fovea_parity.mixed_batch import fullness
from fovea_trainer.batches.datum_decoding import Datum
from fovea_trainer.batches.micro_batch import BatchLayout
from fovea_trainer.model.lora import LoraInjector
from fovea_trainer.model.packed_model import load_model
from fovea_trainer.settings import TrainerSettings

MOST_NAT = 1e-4
MOST_GRADIENT = 1e-3
"""The largest accepted difference of a gradient, relative to the largest element of all gradients.

The two differ because they add in a different order."""

_CPU = torch.device("cpu")
_LONG = "Some words about nothing in particular, longer than any window of a tiny model. " * 6


@dataclass(frozen=True)
class _Case:
    document: Document
    own: BatchFeature


def check(directory: Path) -> Finding:
    """Compares log-probabilities and gradients of packed documents with no, one and two images of various sizes."""
    maker = DocumentMaker(directory)
    cases = [_Case(maker.splice(contents), maker.own(contents)) for contents in _documents(maker.family is not None)]
    packed, ours = _packed(directory, maker, [case.document for case in cases])
    own, theirs = _own(directory, maker.family is not None, cases)
    nat = max(float((a - b).abs().max()) for a, b in zip(packed, own, strict=True))
    gradient = _difference(ours, theirs)
    figures = {"nat": nat, "gradient": gradient, **fullness(maker)}
    said = f"packed = own forward: {nat:.1e} nat, gradients {gradient:.1e}"
    return Finding("trainer", nat <= MOST_NAT and gradient <= MOST_GRADIENT, said, figures)


def _documents(is_vision: bool) -> list[list[Content]]:
    text: list[list[Content]] = [["Short."], [_LONG]]
    if not is_vision:
        return [*text, ["A third document of middling length, to make three."]]
    wide, high = picture((140, 90), 1), picture((60, 110), 2)
    return [*text, [wide, "What is this?"], ["Two: ", high, " and ", wide, " differ."], [_LONG, high]]


def _packed(directory: Path, maker: DocumentMaker, documents: list[Document]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Returns the log-probabilities [N-1] of each document's tokens after the first, and the gradients of their sum."""
    settings = TrainerSettings(model=str(directory), device="cpu", dtype="float32", checkpoints=["unused"])
    family, _, model = load_model(settings, directory, _CPU)
    LoraInjector(family.lora_targets(model.hf))
    model.requires_grad_(True)
    datums = [datum_of(maker, index, document) for index, document in enumerate(documents)]
    images = {tensors_sha256(image.tensors): image.tensors for document in documents for image in document.images}
    batch = BatchLayout(maker.family, _CPU).pack(datums, images, bool(images), None)
    logprobs = model(batch, None, None)[:, 0]
    parts = [part[:-1] for part in torch.split(logprobs, [len(document.ids) for document in documents])]
    torch.autograd.backward(torch.cat(parts).sum())
    return [part.detach() for part in parts], _gradients(model.hf)


def datum_of(
    maker: DocumentMaker, index: int, document: Document, experts: npt.NDArray[np.int16] | None = None
) -> Datum:
    """Returns a document as a datum of the trainer. Each token predicts the next, the last one the first."""
    spans = tuple(
        ImageSpan(
            image.offset,
            image.replacement.is_embedding,
            model_input_pb2.VisionFeature(digest=tensors_sha256(image.tensors)),
        )
        for image in document.images
    )
    patches = 0
    if maker.family is not None:
        patches = sum(maker.family.patch_count(span.embedding_count) for span in spans)
    positions = None if document.positions is None else document.positions.astype(np.int64)
    targets = np.roll(document.ids, -1)[:, None]
    return Datum(index, document.ids, positions, spans, patches, targets, {}, True, experts)


def _own(directory: Path, is_vision: bool, cases: list[_Case]) -> tuple[list[Tensor], dict[str, Tensor]]:
    auto: Any = AutoModelForImageTextToText if is_vision else AutoModelForCausalLM
    part = trained_part(AutoConfig.from_pretrained(directory))
    model = auto.from_pretrained(directory, config=part, dtype=torch.float32).eval()
    found = []
    for case in cases:
        ids = case.own["input_ids"]
        # Processors mark the tokens of images only if there are images, but some models need the mark in training, so
        # the model runs in eval mode.
        logits = model(**case.own).logits[0, :-1].float()
        logprobs = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        logprobs.sum().backward()
        found.append(logprobs.detach())
    return found, _gradients(model)


def _gradients(model: Any) -> dict[str, Tensor]:
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def _difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Returns the largest difference relative to the largest element, or infinity if one side lacks a gradient.

    transformers has Llama 4's experts transposed.
    """
    if set(ours) != set(theirs):
        return float("inf")
    pairs = [(own if own.shape == (one := ours[name]).shape else own.mT, one) for name, own in theirs.items()]
    return max(float((a - b).abs().max()) for a, b in pairs) / max(float(a.abs().max()) for a, _ in pairs)
