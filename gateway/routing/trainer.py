"""The trainer: whether it is there, and whether it is still the one that held a model."""

import asyncio
import logging
from contextlib import suppress

from fovea.api.v1 import trainer_pb2
from fovea.client import TrainerClient
from fovea.wire.errors import DeadlineExceeded, FoveaError, Unavailable

logger = logging.getLogger(__name__)

_POLL_S = 2.0
_POLL_DOWN_S = 0.5


class TrainerLink:
    """Watches the one trainer of this gateway, at host:port. Call `start` before use."""

    def __init__(self, address: str, wait_s: float) -> None:
        self.address = address
        self._wait_s = wait_s
        self._client: TrainerClient | None = None
        self._info: trainer_pb2.GetTrainerInfoResponse | None = None
        self._up = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None
        self._down_since = 0.0
        self._is_reported_down = False

    async def start(self) -> None:
        """Begins to watch."""
        self._down_since = asyncio.get_running_loop().time()
        self._client = TrainerClient(self.address)
        await self._refresh()
        self._watch = asyncio.create_task(self._watch_forever(), name="trainer watch")

    async def close(self) -> None:
        """Stops watching and closes the channel."""
        if self._watch:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if self._client:
            await self._client.close()

    @property
    def client(self) -> TrainerClient:
        """Typed calls."""
        assert self._client is not None, "TrainerLink.start was not called"
        return self._client

    @property
    def info(self) -> trainer_pb2.GetTrainerInfoResponse | None:
        """What it said last; None before it was ever seen."""
        return self._info

    @property
    def is_up(self) -> bool:
        """Whether it answered when last asked."""
        return self._up.is_set()

    async def require(self, patience_s: float = 0.0) -> trainer_pb2.GetTrainerInfoResponse:
        """What the trainer serves, once it is up. Raises Unavailable after a short wait, or after `patience_s`."""
        down_s = asyncio.get_running_loop().time() - self._down_since
        with suppress(TimeoutError):  # who comes long after it went away need not wait to learn it
            await asyncio.wait_for(self._up.wait(), max(self._wait_s - down_s, patience_s, 0.01))
        if not self._up.is_set() or self._info is None:
            raise Unavailable(f"the trainer at {self.address} does not answer")
        return self._info

    async def look_again(self) -> str:
        """Asks now, after a call failed; returns the instance that answers, or an empty text."""
        await self._refresh()
        return self._info.instance_id if self._info is not None and self.is_up else ""

    async def _refresh(self) -> None:
        try:
            info = await self.client.info(timeout_s=5.0)
        except DeadlineExceeded:
            # Busy is not dead: a peer that is gone breaks the connection, which keepalive notices.
            logger.warning("trainer %s is slow to answer", self.address)
            return
        except FoveaError as error:
            if not self._is_reported_down:
                logger.warning("trainer %s does not answer: %s", self.address, error)
            self._is_reported_down = True
            if self._up.is_set():
                self._down_since = asyncio.get_running_loop().time()
            self._up.clear()
            return
        if self._info is not None and info.instance_id != self._info.instance_id:
            logger.warning("trainer %s restarted: models of instance %s are lost", self.address, self._info.instance_id)
        elif not self._up.is_set():
            logger.info("trainer %s is up, instance %s", self.address, info.instance_id)
        self._info = info
        self._is_reported_down = False
        self._up.set()

    async def _watch_forever(self) -> None:
        while True:
            await asyncio.sleep(_POLL_S if self.is_up else _POLL_DOWN_S)
            await self._refresh()
