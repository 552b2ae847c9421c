"""Faults while clients train and sample, with one gateway and with two: nothing is lost, changed or left behind."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal

import chaos.stack
import fovea_tinyvlm
from chaos import checker
from chaos.disk import limits
from chaos.faults import brief_deck, plan, shards_deck
from chaos.inventory import left_after_stop
from chaos.run import client_names, run
from fovea_gateway.database.ownership import shard_of
from tests.postgresql import Server


@pytest.fixture(scope="module")
def portal() -> Iterator[BlockingPortal]:
    """An event loop in its own thread, which runs the proxies between the services."""
    with start_blocking_portal() as portal:
        yield portal


@contextmanager
def disturbed(portal: BlockingPortal, folder: Path, database_url: str = "") -> Iterator[chaos.stack.Stack]:
    """A separate Fovea to be disturbed: its services, which use mutual TLS, and the proxies between them."""
    os.environ["TINKER_TELEMETRY"] = "0"
    running = chaos.stack.running(folder, fovea_tinyvlm.ensure(), database_url=database_url)
    with portal.wrap_async_context_manager(running) as stack:
        yield stack
        left = left_after_stop(stack) if portal.call(stack.stop) else []
        assert left == []


@pytest.mark.timeout(600)  # with another test process on two cores it took 177 s
def test_twenty_faults(portal: BlockingPortal, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    """The short form of `make chaos`."""
    with disturbed(portal, tmp_path_factory.mktemp("chaos")) as stack:
        cards = brief_deck(disk=stack.disk is not None)
        faults = plan(16, len(cards), cards, mean_gap_s=1.0)
        result = portal.call(run, stack, tmp_path, client_names(16, 2), faults)
        print(result.summary(), *limits(), sep="\n")
        assert len(result.disturbed.history.commands) > 50
        assert not result.violations, checker.summary(result.violations)


@pytest.mark.timeout(600)
def test_faults_of_two_gateways(
    portal: BlockingPortal, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, postgresql: Server
) -> None:
    """The short form of `python -m chaos --shards`: two gateways with one shard each, behind a router."""
    with disturbed(portal, tmp_path_factory.mktemp("shards"), postgresql.new_url()) as stack:
        cards = shards_deck()
        faults = plan(3, len(cards), cards, mean_gap_s=1.0)
        result = portal.call(run, stack, tmp_path, client_names(3, 4), faults)
        print(result.summary(), *limits(), sep="\n")
        models = [one for one in result.disturbed.history.commands.values() if one.operation == "create_model"]
        assert {shard_of(one.answers[0].value["model_id"]) for one in models} == {0, 1}
        assert not result.violations, checker.summary(result.violations)
