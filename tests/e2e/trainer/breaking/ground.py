"""Trainers that tests break: one runs at a time, and the next test reuses it if it is alive and has
the same arguments.
"""

import asyncio
import os
import re
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

import fovea_tinyvlm
from fovea.client import TrainerClient
from fovea.wire.errors import Unavailable
from tests.e2e.trainer.conftest import adam
from tests.e2e.trainer.copied_trainer import CopiedTrainer
from tests.e2e.trainer.image_service import ImageService
from tests.processes import survivors

SECONDS = 10.0
_ARGUMENTS = ("--heartbeat-s", "1", "--metrics-port", "0", "--drain-s", "120")


@dataclass
class Ground:
    """A folder in which trainers are started one after the other."""

    folder: Path
    images: ImageService
    process: CopiedTrainer | None = None
    _client: TrainerClient | None = None
    _started: tuple[str, ...] = ()
    count: int = 0

    @property
    def kept(self) -> Path:
        """The folder of recovery data."""
        return self.folder / "recovery"

    @property
    def running(self) -> CopiedTrainer:
        """The trainer that was started last."""
        assert self.process is not None
        return self.process

    def metrics_address(self) -> str:
        """host:port of its metrics, as it reports it."""
        found = re.search(r"metrics on (\S+)", self.running.log.read_text())
        assert found
        return found.group(1)

    def processes(self) -> list[psutil.Process]:
        """Returns the launcher and its ranks."""
        root = psutil.Process(self.running.process.pid)
        return [root, *root.children(recursive=True)]

    async def trainer(self, *arguments: str) -> TrainerClient:
        """Returns the running trainer if it has these arguments; otherwise starts another."""
        if self._client is not None and self._is_alive() and self._started == arguments:
            return self._client
        await self.stop()
        self.count += 1
        log = self.folder / f"trainer-{self.count}.log"
        self.process = CopiedTrainer(fovea_tinyvlm.ensure("qwen3"), log, *_ARGUMENTS, *arguments)
        self._client, self._started = await self.process.ready(), arguments
        return self._client

    async def any_trainer(self) -> TrainerClient:
        """Returns the running trainer with any arguments; otherwise starts one without extra arguments."""
        return await self.trainer(*(self._started if self._is_alive() else ()))

    async def kill(self, victim: int | None, model_id: str, running: "asyncio.Task[None] | None" = None) -> None:
        """Sends SIGKILL to a rank, or to the launcher if None; the whole trainer ends, and commands fail at once.

        Args:
            victim: The rank to kill.
            model_id: A model of the trainer.
            running: Calls in progress.
        """
        assert self._client is not None
        everything, pids = self.processes(), self.running.rank_pids()
        os.kill(self.running.process.pid if victim is None else pids[victim], signal.SIGKILL)
        if running is not None:
            # Rank 0 reports the death of others; nothing reports the death of rank 0.
            with pytest.raises(Unavailable, match="rank 1 of the trainer died" if victim == 1 else None):
                await asyncio.wait_for(running, SECONDS)
        with pytest.raises(Unavailable):
            await self._client.optim_step(model_id, adam(), timeout_s=SECONDS)
        with pytest.raises(Unavailable):  # it no longer reports that it holds models
            await self._client.info(timeout_s=SECONDS)
        status = await asyncio.to_thread(self.running.process.wait, 30)
        assert status == (-signal.SIGKILL if victim is None else 1)
        assert not survivors(everything, SECONDS)
        if victim == 1:
            assert "rank 1 on node 0 died" in self.running.log.read_text()

    async def stop(self) -> None:
        """Ends the trainer, if one runs; it must exit cleanly."""
        if self._client is not None:
            await self._client.close()
            self._client = None
        if self._is_alive():
            assert await asyncio.to_thread(self.running.stop) == 0, self.running.log.read_text()

    async def clear(self) -> None:
        """Deletes models and their recovery data. A trainer that cannot do this has ended."""
        if self._client is None or not self._is_alive():
            shutil.rmtree(self.kept, ignore_errors=True)
            return
        try:
            info = await self._client.info(with_kept=True, timeout_s=SECONDS)
            for model_id in {*info.model_ids, *info.kept_model_ids}:
                await self._client.delete_model(model_id)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Kills the launcher, and with it the ranks."""
        if self.process is not None:
            self.process.kill()

    async def weights(self, model_id: str) -> dict[str, torch.Tensor]:
        """Returns weights, and an adapter's moments, as SaveState writes them; for full parameters, the snapshot's
        weights.
        """
        assert self._client is not None
        folders = [self.folder / f"{model_id}-{self.count}-{what}" for what in ("state", "snapshot")]
        await self._client.save_state(model_id, str(folders[0]))
        await self._client.take_snapshot(model_id, f"{model_id}@end-{self.count}", str(folders[1]))
        return {
            f"{path.name}/{name}": tensor
            for folder in folders
            for path in folder.glob("*.safetensors")
            for name, tensor in load_file(path).items()
        }

    def _is_alive(self) -> bool:
        return self.process is not None and self.process.process.poll() is None
