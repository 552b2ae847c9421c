"""Recorded samples as inputs of a loss, for any number of spans."""

from typing import Any

import numpy as np
import pytest

from fovea.api.v1 import gateway_pb2
from fovea.wire import tensors
from fovea_gateway.sampling import recordings
from fovea_gateway.sampling.recordings import RecordedSequence


class _Counted(bytes):
    """A packed support that counts the bytes read from it."""

    read = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        self.read += len(found)
        return found


@pytest.mark.parametrize("length", [1, 7, 350])
def test_a_datum_of_many_spans_reads_each_row_of_a_support_once(length: int) -> None:
    count, ids = 350, np.arange(350 * 3) % 3
    support = tensors.pack_support(ids, np.arange(0, 3 * count + 1, 3))
    packed, tokens = _Counted(support), np.zeros(count, np.int64)
    logprobs = np.arange(count, dtype=np.float32)
    datum = gateway_pb2.InputDatum()
    for offset in range(0, count, length):
        for spans in (datum.input_spans, datum.target_spans):
            spans.add(sequence_id="s", sampled=True, offset=offset, length=length)
    datum.loss_inputs["target_tokens"].CopyFrom(tensors.encode(tokens))
    recordings._fill_datum(datum, tokens, {"s": RecordedSequence(1.0, tokens, tokens, logprobs, packed)}, "data[0]")
    assert tensors.decode(datum.loss_inputs[tensors.SUPPORT], "support").tobytes() == support
    assert np.array_equal(tensors.decode(datum.loss_inputs["logprobs"], "logprobs"), logprobs)
    assert packed.read == len(support)
