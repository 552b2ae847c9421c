"""A seed determines the plan, and a log can be read as a plan again."""

from itertools import pairwise
from pathlib import Path

from chaos.faults import Fault, Happened, brief_deck, deck, plan, read_log, shards_deck, write_log
from chaos.stack import GATEWAYS, LINKS, TARGETS

CARDS = deck(disk=True, machine=True)


def test_a_seed_gives_the_same_plan_and_another_seed_another() -> None:
    assert plan(7, 100, CARDS, 5.0) == plan(7, 100, CARDS, 5.0)
    assert plan(7, 100, CARDS, 5.0) != plan(8, 100, CARDS, 5.0)


def test_every_fault_that_there_is_is_made() -> None:
    made = {(fault.kind, fault.target) for fault in plan(7, len(CARDS), CARDS, 5.0)}
    assert made == set(CARDS)
    assert {target for _, target in made} == {*TARGETS, *LINKS, "disk"}


def test_with_shards_each_gateway_and_the_router_are_disturbed() -> None:
    more = set(deck(disk=True, machine=True, shards=True)) - set(CARDS)
    every = {(kind, target) for kind in ("kill", "terminate", "stop") for target in GATEWAYS}
    assert more == {card for card in every if card[1] != "gateway"}
    assert every < set(shards_deck())


def test_some_come_in_pairs_and_the_others_apart() -> None:
    faults = plan(7, 200, CARDS, 5.0)
    gaps = [after.at_s - before.at_s for before, after in pairwise(faults)]
    assert min(gaps) >= 0
    assert 30 <= sum(gap <= 0.3 for gap in gaps) <= 90
    assert 600 <= faults[-1].at_s <= 1000


def test_the_brief_run_has_twenty_with_and_without_a_disk() -> None:
    assert len(brief_deck(disk=True)) == len(brief_deck(disk=False)) == 20


def test_a_log_is_read_as_the_plan_of_what_was_made(tmp_path: Path) -> None:
    planned = [Fault(1.0, "kill", "gateway"), Fault(2.0, "slow", "gateway-trainer", 3.0, 0.1)]
    happened = [Happened(fault, 100.0 + fault.at_s + 0.5, 110.0, 112.0) for fault in planned]
    write_log(tmp_path / "faults.jsonl", happened, 100.0)
    assert read_log(tmp_path / "faults.jsonl") == [
        Fault(1.5, "kill", "gateway"),
        Fault(2.5, "slow", "gateway-trainer", 3.0, 0.1),
    ]
