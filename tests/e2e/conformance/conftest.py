"""A separate Fovea: behind a faulty proxy, clients cannot end their sessions and leave models behind."""

import os
from collections.abc import Callable, Iterator
from unittest import mock

import pytest

import fovea_tinyvlm
from fovea_conformance.fresh import ENVIRONMENT, fresh_fovea
from tests.e2e.stack import Stack


@pytest.fixture(scope="package")
def bucket(new_bucket: Callable[[], str]) -> str:
    """The URL of its checkpoints."""
    return new_bucket()


@pytest.fixture(scope="package")
def stack(tmp_path_factory: pytest.TempPathFactory, bucket: str) -> Iterator[Stack]:
    """The Fovea that `make conformance` starts, for this folder only."""
    folder = tmp_path_factory.mktemp("fovea")
    settings = {"FOVEA_GATEWAY_CHECKPOINT_DIR": f"{bucket}/fovea", "TINKER_TELEMETRY": "0"}
    with mock.patch.dict(os.environ, ENVIRONMENT | settings), fresh_fovea(folder) as state:
        yield Stack(state, fovea_tinyvlm.ensure("qwen3_vl"), folder / "up.log")
