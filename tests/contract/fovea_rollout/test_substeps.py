"""A datum that the server refuses is left out, and training continues with the rest of the batch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import tinker

from fovea.wire.errors import InvalidInput
from fovea_rollout.loop.substeps import Substeps
from fovea_rollout.loop.training_batch import TrainingBatch, TrainingDatum
from fovea_rollout.policies.policy import WeightVersions
from tests.contract.gateway.conftest import KEY, Stand, running
from tests.contract.gateway.fakes import MODEL
from tests.contract.gateway.requests import image_datum, text_datum

BAD = image_datum(expected_tokens=5)


@pytest.fixture
async def stand(tmp_path: Path) -> AsyncIterator[Stand]:
    async with running(Stand(tmp_path)) as stand:
        yield stand


def batch(**data: tinker.Datum) -> TrainingBatch:
    """Returns the datums by conversation."""
    versions, mask, stamps = WeightVersions(0, 0), np.ones(1, np.bool_), np.zeros((1, 2), np.int64)
    return TrainingBatch([TrainingDatum(datum, versions, name, (0,), (), mask, stamps) for name, datum in data.items()])


@contextmanager
def substeps(stand: Stand) -> Iterator[Substeps]:
    with tinker.ServiceClient(base_url=stand.url, api_key=KEY) as service:
        training = service.create_lora_training_client(base_model=MODEL).result()
        yield Substeps(training, "cross_entropy", {}, tinker.AdamParams(learning_rate=1e-3))


async def test_the_rest_of_a_refused_part_is_trained_after_the_others(stand: Stand) -> None:
    parts = [batch(a=text_datum(), bad=BAD), batch(c=text_datum(), d=text_datum(), e=text_datum())]

    def use() -> tuple[list[list[str]], list[int], dict[str, Exception]]:
        with substeps(stand) as steps:
            outputs, errors = asyncio.run(steps.run(parts))
            trained = [[datum.conversation for datum in part.data] for part, _ in outputs]
            return trained, [len(output.loss_fn_outputs) for _, output in outputs], errors

    trained, counts, errors = await asyncio.to_thread(use)
    assert trained == [["c", "d", "e"], ["a"]]
    assert counts == [3, 1]
    assert list(errors) == ["bad"]
    assert "expected 5 tokens, got 4" in str(errors["bad"])
    assert len(stand.trainer.of("OptimStep")) == 2, "a step must not run without all gradients of its batch"


async def test_a_batch_of_which_everything_is_refused_is_an_error(stand: Stand) -> None:
    def use() -> None:
        with substeps(stand) as steps, pytest.raises(tinker.RequestFailedError, match="expected 5 tokens, got 4"):
            asyncio.run(steps.run([batch(a=BAD), batch(b=BAD)]))

    await asyncio.to_thread(use)


async def test_a_refusal_that_no_datum_causes_is_raised(stand: Stand) -> None:
    stand.trainer.failures["ForwardBackward"].append(InvalidInput("the batch as a whole is wrong"))

    def use() -> None:
        with substeps(stand) as steps, pytest.raises(tinker.RequestFailedError, match="the batch as a whole is wrong"):
            asyncio.run(steps.run([batch(a=text_datum(), b=text_datum())]))

    await asyncio.to_thread(use)
