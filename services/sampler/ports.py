"""What the service asks of an engine. `engine.engine.Engine` is the one over vLLM."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from fovea.api.v1 import sampler_pb2, weights_pb2
from fovea.wire.features import FeatureTensors
from services.sampler.engine_api import AdapterName, Event, SampleSpec


class SampleEngine(Protocol):
    """Draws tokens."""

    def prompt(self, spec: SampleSpec, images: Sequence[FeatureTensors]) -> Any:
        """The prompt in the engine's own form, for all sequences of the request; `images` are those of each span."""
        ...

    def sample(self, spec: SampleSpec, index: int, prompt: Any, adapter: AdapterName | None) -> AsyncGenerator[Event]:
        """Events of sequence `index`: PromptFacts first, then Deltas. Closing it aborts the request.

        Only sequence 0 scores the prompt, if the request asks for that. Raises Unavailable if the engine is dead.
        """
        ...


class WeightEngine(Protocol):
    """Takes weights. All methods raise Unavailable if the engine is dead and DeadlineExceeded if it does not answer."""

    async def join_group(self, request: sampler_pb2.JoinTransferGroupRequest) -> None:
        """Joins a group, leaving one of the same name. Raises Unavailable if the members do not meet in time."""
        ...

    async def leave_group(self, group_id: str) -> None:
        """Leaves a transfer group; a broadcast under way fails."""
        ...

    async def start_receive(self, group_id: str, manifest: weights_pb2.SnapshotManifest, timeout_s: float) -> str:
        """Begins to take part in the broadcasts of a snapshot; returns the name of the task.

        Raises InvalidInput for a manifest that does not fit the model, before anything begins.
        """
        ...

    async def wait_received(self, task_id: str, timeout_s: float) -> str:
        """Waits for the tensors; returns their digest. Raises Unavailable if the sender is gone or late."""
        ...

    async def forget_task(self, task_id: str) -> None:
        """Frees what a task received and was not loaded."""
        ...

    async def keep_adapter(self, task_id: str, adapter: AdapterName, digest: str, timeout_s: float) -> str:
        """Waits for the tensors of an adapter and makes it ready to sample from if they have this digest.

        Returns their digest. Raises Unavailable if the sender is gone or late.
        """
        ...

    async def forget_adapter(self, adapter: AdapterName) -> None:
        """Frees an adapter that no request uses."""
        ...

    async def load_full(self, task_id: str, version: str) -> float:
        """Puts full weights that have arrived into the model; returns the seconds of standstill."""
        ...
