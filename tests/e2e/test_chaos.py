"""Twenty faults while clients train and sample: nothing is lost, nothing differs, nothing stays behind."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal

import chaos.stack
import fovea_tinyvlm
from chaos import checker
from chaos.disk import limits
from chaos.faults import brief_deck, plan
from chaos.inventory import left_after_stop
from chaos.run import client_names, run


@pytest.fixture(scope="module")
def portal() -> Iterator[BlockingPortal]:
    """An event loop in a thread of its own, in which the links between parts pass on what the tests cause."""
    with start_blocking_portal() as portal:
        yield portal


@pytest.fixture(scope="module")
def disturbed(portal: BlockingPortal, tmp_path_factory: pytest.TempPathFactory) -> Iterator[chaos.stack.Stack]:
    """A Fovea of its own, to be broken: its parts, which talk over mutual TLS, and the links between them."""
    os.environ["TINKER_TELEMETRY"] = "0"
    folder = tmp_path_factory.mktemp("chaos")
    with portal.wrap_async_context_manager(chaos.stack.running(folder, fovea_tinyvlm.ensure())) as stack:
        yield stack
        left = left_after_stop(stack) if portal.call(stack.stop) else []
        assert left == []


@pytest.mark.timeout(600)  # beside another lane on two cores it took 177 s
def test_twenty_faults(disturbed: chaos.stack.Stack, portal: BlockingPortal, tmp_path: Path) -> None:
    """The brief form of `make chaos`."""
    cards = brief_deck(disk=disturbed.disk is not None)
    faults = plan(16, len(cards), cards, mean_gap_s=1.0)
    result = portal.call(run, disturbed, tmp_path, client_names(16, 2), faults)
    print(result.summary(), *limits(), sep="\n")
    assert len(result.disturbed.history.commands) > 50
    assert not result.violations, checker.told(result.violations)
