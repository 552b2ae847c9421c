"""A real trainer without its launcher: its ranks begin as copies of a process that has imported them.

For tests of what a trainer computes and keeps: they wait for no imports, of five seconds of a processor for each rank.
How a trainer begins and ends is tested with `TrainerProcess`.
"""

import gc
import multiprocessing
import os
import tempfile
import time
from pathlib import Path

import torch

from fovea.client import TrainerClient
from fovea.runtime.hosts import free_ports, interface_of
from fovea.runtime.processes import configure_logging, die_with_parent
from fovea_trainer.ranks.rank_launcher import RankEnvironment
from fovea_trainer.settings import TrainerSettings
from tests.e2e.trainer.trainer_process import checkpoints, until_serving
from tests.ranks import PRELOADED


class CopiedTrainer:
    """A trainer on a free port, with the arguments of `python -m fovea_trainer`."""

    def __init__(self, model_dir: Path, log: Path, *arguments: str) -> None:
        (self.port,) = free_ports(1)
        self.address = f"127.0.0.1:{self.port}"
        self.log = log
        place = ["--model", str(model_dir), "--port", str(self.port), "--recovery", str(log.parent / "recovery")]
        command = [*place, *checkpoints(log.parent.parent), *arguments]
        ranks = TrainerSettings.from_command_line("trainer", command).ranks
        self._meeting = tempfile.TemporaryDirectory(prefix="fovea-trainer-")
        multiprocessing.set_forkserver_preload(PRELOADED)
        context = multiprocessing.get_context("forkserver")
        log.touch()
        self._ranks = [
            context.Process(
                target=_be_rank,
                args=(RankEnvironment(rank, ranks, rank, 0, self._meeting.name, 0), command, dict(os.environ), log),
                daemon=True,
            )
            for rank in range(ranks)
        ]
        for rank in self._ranks:
            rank.start()

    async def ready(self) -> TrainerClient:
        """A client, once the trainer serves."""
        return await until_serving(self.address, self._lives, self.log.read_text)

    def rank_pids(self) -> list[int]:
        """Process ids of the ranks, rank 0 first."""
        return [rank.pid or 0 for rank in self._ranks]

    def stop(self, timeout_s: float = 40.0) -> int:
        """SIGTERM to all ranks; returns the first bad exit status, if there is one."""
        for rank in self._ranks:
            rank.terminate()
        give_up_at = time.monotonic() + timeout_s
        for rank in self._ranks:
            rank.join(max(0.0, give_up_at - time.monotonic()))
        self.kill()
        return next((rank.exitcode for rank in self._ranks if rank.exitcode), 0)

    def kill(self) -> None:
        """SIGKILL to all ranks that there are."""
        for rank in self._ranks:
            rank.kill()
            rank.join()
        self._meeting.cleanup()

    def _lives(self) -> bool:
        return all(rank.is_alive() for rank in self._ranks)


def _be_rank(rank_env: RankEnvironment, command: list[str], environment: dict[str, str], log: Path) -> None:
    """What `fovea_trainer.__main__` does for a rank."""
    from fovea_trainer.trainer_process import follower_process, leader_process

    gc.freeze()
    die_with_parent()
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ |= environment | rank_env.to_environ()
    os.environ["GLOO_SOCKET_IFNAME"] = interface_of("127.0.0.1") or "lo"
    settings = TrainerSettings.from_command_line("trainer", command)
    torch.set_num_threads(settings.threads)  # the launcher says so to OpenMP, which has begun here
    configure_logging("trainer" if rank_env.rank == 0 else f"trainer{rank_env.rank}", settings.log_level)
    leader_process(settings, rank_env) if rank_env.rank == 0 else follower_process(settings, rank_env)
