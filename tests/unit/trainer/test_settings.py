"""Which combinations of settings the trainer refuses, and by which name."""

import pytest

from services.trainer.settings import TrainerSettings


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--nodes 2 --node-rank 2 --master-addr a", "--node-rank: Value error, 2 is not below --nodes, 2"),
        ("--node-rank 1", "--node-rank: Value error, 1 is not below --nodes, 1"),
        ("--nodes 2", "--master-addr: Value error, --nodes is 2; give the address at which they reach node 0"),
        ("--nodes 0", "--nodes: Input should be greater than or equal to 1"),
        ("--nodes 2 --master-addr a --master-port 0", "--master-port: Input should be greater than or equal to 1"),
    ],
)
def test_wrong_nodes_are_refused_by_name(arguments: str, said: str) -> None:
    with pytest.raises(SystemExit, match=said):
        TrainerSettings.from_command_line("trainer", ["--model", "m", *arguments.split()])


def test_one_node_is_the_default() -> None:
    settings = TrainerSettings.from_command_line("trainer", ["--model", "m"])
    assert (settings.nodes, settings.node_rank, settings.master_addr) == (1, 0, "")
