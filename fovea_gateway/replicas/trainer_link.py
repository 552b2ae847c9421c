"""The gateway's connection to a trainer: its health and its current instance."""

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
    """The trainer of a base model. Call `start` before use.

    Args:
        wait_s: Seconds that a call waits for a trainer that went away.

    Attributes:
        info: The last info that it sent; None until it has answered.
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
        """Checks the trainer once and starts the regular checks."""
        self._down_since = asyncio.get_running_loop().time()
        await self.refresh(is_first=True)
        self._watch = asyncio.create_task(self.watch(), name="trainer watch")

    async def close(self) -> None:
        """Stops the checks and closes the channel."""
        if self._watch:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await self._client.close()

    @property
    def client(self) -> TrainerClient:
        return self._client

    @property
    def instance_id(self) -> str:
        """The id of the last instance that answered; empty until the trainer has answered."""
        return self.info.instance_id if self.info is not None else ""

    async def ask(self) -> None:
        """Asks for the trainer's info. A new instance has no models in memory."""
        info = await self._client.info(timeout_s=5.0)
        if self.info is not None and info.instance_id != self.info.instance_id:
            logger.warning("trainer %s restarted as instance %s", self.address, info.instance_id)
        self.info = info

    def check_files(self, who: str, files: Mapping[str, str]) -> None:
        """Raises FailedPrecondition, which names the file, if another service has different model files."""
        if unlike := self.find_unlike(files):
            raise FailedPrecondition(
                f"{who} has another {unlike} than the trainer at {self.address}: give all services the same model"
            )

    def find_unlike(self, files: Mapping[str, str]) -> str:
        """Returns the name of a model file in which another service differs from the trainer, or an empty text.

        Until the trainer has answered, no file differs.
        """
        return find_unlike(self.info.model_files if self.info is not None else {}, files)

    async def require(self, patience_s: float = 0.0) -> trainer_pb2.GetTrainerInfoResponse:
        """Returns the trainer's info once it is up. Raises Unavailable after a short wait, or after `patience_s`."""
        down_s = asyncio.get_running_loop().time() - self._down_since
        with suppress(TimeoutError):  # A call long after the failure need not wait to learn of it.
            await asyncio.wait_for(self._is_up.wait(), max(self._wait_s - down_s, patience_s, 0.01))
        if not self.up or self.info is None:
            raise Unavailable(f"the trainer at {self.address} does not answer")
        return self.info

    async def look_again(self) -> str:
        """Checks the trainer after a failed call. Returns the instance that answers, or an empty text."""
        await self.refresh()
        return self.instance_id if self.up else ""

    def _note(self) -> None:
        if self.up:
            self._is_up.set()
        elif self._is_up.is_set():
            self._down_since = asyncio.get_running_loop().time()
            self._is_up.clear()
