"""The trainer: whether it is there, and which instance of it."""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress

from fovea.api.v1 import trainer_pb2
from fovea.client import TrainerClient
from fovea.wire.errors import FailedPrecondition, Unavailable
from fovea_gateway.replicas.replicas import Peer, find_unlike

logger = logging.getLogger(__name__)


class TrainerLink(Peer):
    """The one trainer of a base model. Call `start` before use.

    Args:
        wait_s: How long a call waits for it once it went away.

    Attributes:
        info: What it said last; None before it was ever seen.
    """

    def __init__(self, address: str, wait_s: float) -> None:
        super().__init__("trainer", address, self._note)
        self._client = TrainerClient(address)
        self._wait_s = wait_s
        self.info: trainer_pb2.GetTrainerInfoResponse | None = None
        self._is_up = asyncio.Event()
        self._down_since = 0.0
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Asks it once, and begins to watch."""
        self._down_since = asyncio.get_running_loop().time()
        await self.refresh(is_first=True)
        self._watch = asyncio.create_task(self.watch(), name="trainer watch")

    async def close(self) -> None:
        """Stops watching and closes the channel."""
        if self._watch:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await self._client.close()

    @property
    def client(self) -> TrainerClient:
        return self._client

    @property
    def instance_id(self) -> str:
        """Of the one that answered last; empty before it was ever seen."""
        return self.info.instance_id if self.info is not None else ""

    async def ask(self) -> None:
        """Asks what it serves; another instance has none of the models in memory."""
        info = await self._client.info(timeout_s=5.0)
        if self.info is not None and info.instance_id != self.info.instance_id:
            logger.warning("trainer %s restarted as instance %s", self.address, info.instance_id)
        self.info = info

    def check_files(self, who: str, files: Mapping[str, str]) -> None:
        """Raises FailedPrecondition, naming it, for a file of the model that another service reads differently."""
        if unlike := self.find_unlike(files):
            raise FailedPrecondition(
                f"{who} has another {unlike} than the trainer at {self.address}: give all services the same model"
            )

    def find_unlike(self, files: Mapping[str, str]) -> str:
        """Which of the model's files, as the info of another service tells them, is not the trainer's; or nothing.

        Until the trainer was seen, all are alike.
        """
        return find_unlike(self.info.model_files if self.info is not None else {}, files)

    async def require(self, patience_s: float = 0.0) -> trainer_pb2.GetTrainerInfoResponse:
        """What the trainer serves, once it is up. Raises Unavailable after a short wait, or after `patience_s`."""
        down_s = asyncio.get_running_loop().time() - self._down_since
        with suppress(TimeoutError):  # who comes long after it went away need not wait to learn it
            await asyncio.wait_for(self._is_up.wait(), max(self._wait_s - down_s, patience_s, 0.01))
        if not self.up or self.info is None:
            raise Unavailable(f"the trainer at {self.address} does not answer")
        return self.info

    async def look_again(self) -> str:
        """Asks now, after a call failed; returns the instance that answers, or an empty text."""
        await self.refresh()
        return self.instance_id if self.up else ""

    def _note(self) -> None:
        if self.up:
            self._is_up.set()
        elif self._is_up.is_set():
            self._down_since = asyncio.get_running_loop().time()
            self._is_up.clear()
