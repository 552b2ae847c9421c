"""Combinations of settings that the trainer refuses, and the setting that each error names."""

import pytest

from fovea_trainer.settings import TrainerSettings


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--nodes 2 --node-rank 2 --master-addr a", "--node-rank: 2 is not below --nodes, 2"),
        ("--node-rank 1", "--node-rank: 1 is not below --nodes, 1"),
        ("--nodes 2", "--master-addr: --nodes is 2; set the address at which they reach node 0"),
        ("--ranks 2 --expert-parallel 3", "--expert-parallel: 3 does not divide --ranks, 2"),
        ("--expert-parallel 0", "--expert-parallel: Input should be greater than or equal to 1"),
        ("--nodes 0", "--nodes: Input should be greater than or equal to 1"),
        ("--nodes 2 --master-addr a --master-port 0", "--master-port: Input should be greater than or equal to 1"),
        ("--ranks 1 --shared-base /nowhere/base", "--shared-base: the folder /nowhere does not exist"),
    ],
)
def test_wrong_settings_are_refused_by_name(arguments: str, said: str) -> None:
    with pytest.raises(SystemExit, match=said):
        TrainerSettings.from_command_line("trainer", ["--model", "m", *arguments.split()])


def test_replicas_divide_the_ranks_of_all_nodes() -> None:
    settings = TrainerSettings(model="m", ranks=2, replicas=3)
    settings.check_replicas(6)  # of three nodes
    said = "--replicas is 3, which does not divide the 4 ranks of all nodes: use one of 1, 2, 4, or other --ranks"
    with pytest.raises(ValueError, match=said):
        settings.check_replicas(4)


def test_one_node_is_the_default() -> None:
    settings = TrainerSettings.from_command_line("trainer", ["--model", "m"])
    assert (settings.nodes, settings.node_rank, settings.master_addr) == (1, 0, "")


@pytest.mark.parametrize(
    ("ranks", "nodes", "most", "senders"),
    [(1, 1, 4, [0]), (2, 1, 4, [0, 1]), (8, 1, 4, [0, 2, 4, 6]), (8, 2, 2, [0, 8]), (3, 1, 2, [0, 1]), (8, 1, 1, [0])],
)
def test_senders_are_spread_over_the_nodes(ranks: int, nodes: int, most: int, senders: list[int]) -> None:
    arguments = f"--model m --ranks {ranks} --nodes {nodes} --master-addr 127.0.0.1 --transfer-senders {most}"
    settings = TrainerSettings.from_command_line("trainer", arguments.split())
    numbers = {rank: settings.sender_of(rank) for rank in range(ranks * nodes)}
    assert [rank for rank, number in numbers.items() if number is not None] == senders
    assert [numbers[rank] for rank in senders] == list(range(settings.sender_count))
