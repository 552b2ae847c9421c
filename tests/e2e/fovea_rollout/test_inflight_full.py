"""Rollouts during pushes of full weights. Such a model needs the whole trainer, so no fixture holds one."""

import asyncio
from functools import partial

import numpy as np
import pytest
import tinker
from transformers import PreTrainedTokenizerBase

from fovea_rollout import ChatTemplate, StepReport, train
from tests.e2e.fovea_rollout.test_inflight import (
    GROUPS,
    MOST,
    SIZE,
    TOLERANCE,
    Describing,
    Held,
    differences,
    in_order,
    settings,
)
from tests.e2e.stack import Stack


@pytest.fixture(scope="module")
def template(tokenizer: PreTrainedTokenizerBase) -> ChatTemplate:
    return ChatTemplate(tokenizer)


async def test_all_parameters_are_pushed_under_requests_in_flight(stack: Stack, template: ChatTemplate) -> None:
    """Each token's log-probability matches a version within its bounds; no rollout is lost or too old."""
    reports, clients = list[StepReport](), list[tinker.SamplingClient]()
    with stack.service_client() as service:
        training = await service.create_lora_training_client(base_model=stack.model_name, rank=0)
        clients.append(await training.save_weights_and_get_sampling_client())

        async def note(report: StepReport) -> None:
            reports.append(report)
            clients.append(await training.save_weights_and_get_sampling_client())

        held = Held()
        held.first.set()
        sources = in_order([partial(Describing, held, group) for group in range(4 * GROUPS)])
        changes = {"learning_rate": 1e-4, "portion": MOST, "max_lag": 2}
        await train(training, template, sources, settings(4, **changes), note)
        assert [report.failures for report in reports] == [()] * 4
        assert max(report.lag for report in reports) <= 2
        played = [one.conversation for report in reports for group in report.trajectories for one in group]
        assert len(set(played)) == 4 * GROUPS * SIZE
        trained = [made for report in reports for made in report.data]
        by_version = [await asyncio.gather(*(differences([client], made) for made in trained)) for client in clients]
        for made, *each in zip(trained, *by_version, strict=True):
            found = np.concatenate(each)
            for token, (oldest, newest) in enumerate(made.token_versions[made.mask]):
                assert found[oldest : newest + 1, token].min() < TOLERANCE
