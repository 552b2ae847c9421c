"""An engine without a model: it draws known tokens and records the names of weights. For tests of
the code around it.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import numpy as np

from fovea.api.v1 import sampler_pb2, weights_pb2
from fovea.wire.errors import InvalidInput, NotFinite, Unavailable
from fovea.wire.tensors import FeatureTensors
from fovea_sampler.engine_api import AdapterName, AltRows, Delta, Event, Finish, PromptResult, SampleSpec


async def eventually(condition: Callable[[], bool]) -> None:
    """Waits until a condition holds, ten seconds at most."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - conditions are of any kind
            await asyncio.sleep(0)


def facts_of(spec: SampleSpec) -> PromptResult:
    """Returns prompt results: a target's score is minus its id, and row i draws token i."""
    alt = None
    if spec.request.alt_token_count:
        ids = np.repeat(np.arange(len(spec.tokens) - 1, dtype=np.int32)[:, None], spec.request.alt_token_count, axis=1)
        alt = AltRows(ids, -ids.astype(np.float32))
    return PromptResult(
        logprobs=np.full(len(spec.tokens), np.nan, np.float32),
        top=None,
        cached_token_count=0,
        target_logprobs=-spec.targets.token_ids.astype(np.float32) if spec.targets else None,
        alt=alt,
    )


class MemoryEngine:
    """Sequence i of a prompt draws the prompt's tokens plus i, one per step, until `max_tokens`."""

    def __init__(self) -> None:
        self.adapters: dict[str, str] = {}
        self.used_names: list[str] = []
        self.groups: set[str] = set()
        self.tasks: dict[str, weights_pb2.SnapshotManifest] = {}
        self.digests: dict[str, str] = {}
        self.full = "base"
        self.running = 0
        self.pinned = 0
        """Running sequences that need their present weights."""
        self.fail_loading = False
        self.stop_at: int | None = None
        """The token before which `step` is cleared, once."""
        self.overflowing: set[str] = set()
        """Digests of adapters with NaN log-probabilities after the first token."""
        self.step = asyncio.Event()
        self.step.set()
        self.arrived = asyncio.Event()
        self.arrived.set()

    def prompt(self, spec: SampleSpec, images: Sequence[FeatureTensors]) -> Any:
        """The images' sizes, visible to tests."""
        return [image["pixel_values"].shape for image in images]

    async def sample(
        self, spec: SampleSpec, index: int, prompt: Any, adapter: AdapterName | None
    ) -> AsyncGenerator[Event]:
        """Draws tokens."""
        if adapter is not None:
            self.used_names.append(adapter.name)
            if adapter.name not in self.adapters:
                raise Unavailable(f"adapter {adapter.name} is gone")
        self.running += 1
        self.pinned += not spec.request.follow_updates
        try:
            yield facts_of(spec)
            for number in range(spec.params.max_tokens):
                if number == self.stop_at:
                    self.stop_at = None
                    self.step.clear()
                await self.step.wait()
                await asyncio.sleep(0)
                if number and adapter is not None and self.adapters[adapter.name] in self.overflowing:
                    raise NotFinite("log-probabilities of the sampled tokens are NaN or infinite")
                token = np.asarray([spec.tokens[number % len(spec.tokens)] + index], dtype=np.int32)
                last = number + 1 == spec.params.max_tokens
                maker = None if adapter is not None or self.full == "base" else self.full
                finish: Finish | None = "length" if last else None
                yield Delta(index, token, np.asarray([-1.0], np.float32), None, finish, snapshot_id=maker)
        finally:
            self.running -= 1
            self.pinned -= not spec.request.follow_updates

    async def join_group(self, request: sampler_pb2.JoinTransferGroupRequest) -> None:
        """Joins a group; nothing listens on port 1."""
        if request.master_port == 1:
            raise Unavailable("did not meet")
        self.groups.add(request.group_id)

    async def leave_group(self, group_id: str) -> None:
        """Leaves the group."""
        self.groups.discard(group_id)

    async def check(self, manifest: weights_pb2.SnapshotManifest) -> None:
        """Refuses manifests without tensors."""
        if not manifest.tensors:
            raise InvalidInput("manifest: the manifest lists no tensors", field="manifest")

    async def start_receive(
        self, group_id: str, manifest: weights_pb2.SnapshotManifest, timeout_s: float
    ) -> tuple[str, sampler_pb2.SnapshotReady]:
        """Starts to receive. Refuses manifests without tensors."""
        if not manifest.tensors:
            raise InvalidInput("manifest: the manifest lists no tensors", field="manifest")
        task_id = f"task-{len(self.digests)}"
        self.tasks[task_id] = manifest
        self.digests[task_id] = manifest.snapshot.digest
        return task_id, sampler_pb2.SnapshotReady()

    async def wait_received(self, task_id: str, timeout_s: float) -> str:
        """Waits for `arrived`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.arrived.wait()
        except TimeoutError:
            raise Unavailable("the snapshot did not arrive") from None
        return self.digests[task_id]

    async def forget_task(self, task_id: str) -> None:
        """Forgets a task."""
        self.tasks.pop(task_id, None)

    async def store_adapter(self, task_id: str, adapter: AdapterName, digest: str, timeout_s: float) -> str:
        """Waits for `arrived`, then stores the adapter."""
        assert adapter.name not in self.adapters, "a name was used twice"
        arrived = await self.wait_received(task_id, timeout_s)
        if arrived == digest:
            self.adapters[adapter.name] = arrived
        return arrived

    async def forget_adapter(self, adapter: AdapterName) -> None:
        """Forgets an adapter in two steps. A request that uses the adapter would find it gone, and the engine would
        crash.
        """
        await asyncio.sleep(0)
        self.adapters.pop(adapter.name, None)

    async def load_full(self, task_id: str, version: str) -> float:
        """Loads full weights in two steps."""
        assert not self.pinned, "weights changed during a request"
        if self.fail_loading:
            raise Unavailable("half-loaded")
        self.full = "?"
        await asyncio.sleep(0.01)
        self.full = self.tasks[task_id].snapshot.snapshot_id
        return 0.25
