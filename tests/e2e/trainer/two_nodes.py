"""Two nodes on one machine: the processes of two pods, with their own ports."""

from pathlib import Path

import psutil

from fovea.runtime.hosts import free_ports
from tests.e2e.trainer.copied_trainer import CopiedTrainer


class TwoNodes:
    """A trainer of two nodes with the given numbers of ranks; node 0 serves."""

    def __init__(self, model_dir: Path, folder: Path, ranks: tuple[int, int], *arguments: str) -> None:
        (port,) = free_ports(1)
        meeting = ["--nodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port)]
        self.leader, self.follower = (
            CopiedTrainer(
                model_dir,
                folder / f"node-{node}.log",
                *[*meeting, "--node-rank", str(node), "--metrics-port", "0", *arguments],
                ranks=ranks[node],
            )
            for node in (0, 1)
        )

    def processes(self) -> list[psutil.Process]:
        """The launchers and their ranks."""
        launchers = [psutil.Process(node.process.pid) for node in (self.leader, self.follower)]
        return [process for root in launchers for process in (root, *root.children(recursive=True))]

    def logs(self) -> str:
        """Returns the logs of both nodes."""
        return "".join(node.log.read_text() for node in (self.leader, self.follower))

    def kill(self) -> None:
        """Kills the launchers, which ends their ranks."""
        for node in (self.leader, self.follower):
            node.kill()
