"""Provenance of datums: the sampled sequences from which their tokens came, for the loss `stable_reinforce`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from fovea_rollout.late_sdk import tinker
from fovea_rollout.policies.policy import Portion

Span: TypeAlias = "tinker.types.PromptProvenanceSpan | tinker.types.SampledProvenanceSpan"


def with_provenance(
    datum: tinker.Datum, lengths: Sequence[int], sampled: Mapping[int, Sequence[Portion]]
) -> tinker.Datum:
    """Returns a datum that names the sequence of each of its tokens; the same datum if the server reported no ids.

    Args:
        datum: Inputs are all tokens of the chunks except the last, targets all except the first.
        lengths: Number of tokens of each chunk. The last chunk is sampled.
        sampled: The portions of each sampled chunk, by its index. The prompt of its first request was all before it.
    """
    if not all(portion.sequence_id for portions in sampled.values() for portion in portions):
        return datum
    spans: list[Span] = []
    place = read = 0
    for index, length in enumerate(lengths):
        if portions := sampled.get(index):
            spans.append(
                tinker.types.PromptProvenanceSpan(sequence_id=portions[0].sequence_id, offset=read, length=place - read)
            )
            spans += [
                tinker.types.SampledProvenanceSpan(sequence_id=one.sequence_id, length=one.count) for one in portions
            ]
            read = place + length
        place += length
    spans = _without_empty(spans)
    first, last = spans[0], spans[-1]
    inputs = [*spans[:-1], replace(last, length=last.length - 1)]
    targets = [replace(first, offset=first.offset + 1, length=first.length - 1), *spans[1:]]
    return datum.with_provenance(_without_empty(inputs), _without_empty(targets))


def _without_empty(spans: Sequence[Span]) -> list[Span]:
    return [span for span in spans if span.length]
