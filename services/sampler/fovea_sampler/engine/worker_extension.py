"""The methods that Fovea adds to vLLM's worker. The service calls them through `collective_rpc`.

vLLM imports this module in the worker's process before it creates the worker, and the import prepares the process.
"""

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from fovea.api.v1 import sampler_pb2, weights_pb2
from fovea.runtime.model_files import UNTRAINED
from fovea.runtime.processes import die_with_parent
from fovea_sampler import vllm_patches
from fovea_sampler.engine import base_sharing, weight_loading
from fovea_sampler.engine.manifest_check import (
    ExpertSizes,
    ManifestChecker,
    check_biases,
    checkpoint_shapes,
    names_after,
)
from fovea_sampler.engine.snapshot_receiver import Arrival, SnapshotReceiver
from fovea_sampler.engine.vllm_launch import SERVICE_PID_VARIABLE
from fovea_sampler.engine.weight_loading import AdapterBank, rename_of


def _end_with_service() -> None:
    """Ensures that this process ends when the service ends for any reason."""
    # A terminal sends Ctrl-C to the whole process group. Only the service handles it, by letting requests in flight
    # end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    service, parent = int(os.environ.get(SERVICE_PID_VARIABLE, "1")), os.getppid()
    if service in (1, parent):
        return
    # This is one of several workers. Their parent is vLLM's engine process, which would outlive the service.
    try:
        ends = os.pidfd_open(service), os.pidfd_open(parent)
    except ProcessLookupError:
        os._exit(1)
    threading.Thread(target=_end_engine_after, args=ends, name="end-with-service", daemon=True).start()


def _end_engine_after(service: int, engine: int) -> None:
    """Waits until the service ends, then kills the engine. Both are pidfds.

    The engine's workers end with the engine.
    """
    select.select([service], [], [])
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(engine, signal.SIGKILL)
    os._exit(1)


_end_with_service()
base_sharing.register()
vllm_patches.before_model()


class WorkerExtension:
    """A mix-in that vLLM adds to its worker class (`worker_extension_cls`)."""

    model_runner: Any
    weight_transfer_engine: Any
    parallel_config: Any
    device: torch.device
    rank: int

    def fovea_prepare(self, checkpoint: str) -> tuple[str, int]:
        """Prepares the loaded model for adapters from memory, snapshots and exact log-probabilities. Called once.

        Args:
            checkpoint: The directory of the checkpoint.

        Returns:
            The reason why the worker cannot return the experts of tokens, or an empty string; and the bytes of the
            expert ids of one token.
        """
        self._receiver = SnapshotReceiver(self.device, self.rank, self.parallel_config.world_size)
        model, shapes = self.model_runner.get_model(), checkpoint_shapes(Path(checkpoint))
        rename, left_out = rename_of(model), _left_out(model, shapes)
        adaptable: dict[str, torch.nn.Module] = {}
        sizes: dict[str, ExpertSizes | str] = {}
        max_rank = 0
        if self.model_runner.lora_config is not None:
            manager = self.model_runner.lora_manager
            adaptable, max_rank = _adaptable_modules(manager._adapter_manager), manager.lora_config.max_lora_rank
            sizes = _expert_sizes(manager._adapter_manager)
            self._bank = AdapterBank(manager)  # after this, vLLM's manager no longer exposes its modules
        check_biases(shapes, rename, adaptable)
        self._checker = ManifestChecker(shapes, rename, left_out, set(adaptable), max_rank, sizes)
        self._splits = weight_loading.split_table(rename)
        self.weight_transfer_engine.init_transfer_engine(weight_loading.ArrivalInitInfo(self._receiver.arrival))
        vllm_patches.after_model(self.model_runner)
        experts = self.model_runner.fovea_experts
        return experts.problem, experts.row_bytes

    def fovea_cache_bytes(self) -> int:
        """Returns the bytes of this worker's KV cache if vLLM has sized it, as it does on a GPU; else 0."""
        return int(getattr(self, "available_kv_cache_memory_bytes", 0))

    def fovea_join(self, task_id: str, request: bytes, backend: str) -> None:
        """Starts to join the group of a serialized JoinTransferGroupRequest; poll `fovea_report` for the outcome."""
        self._receiver.start_join(task_id, sampler_pb2.JoinTransferGroupRequest.FromString(request), backend)

    def fovea_check(self, manifest: bytes) -> str:
        """Returns the problem of a serialized SnapshotManifest, or an empty string."""
        return self._checker.problem(weights_pb2.SnapshotManifest.FromString(manifest))

    def fovea_receive(self, task_id: str, group_id: str, manifest: bytes, timeout_s: float) -> tuple[str, bytes]:
        """Starts to receive a snapshot; `fovea_report` reports when all tensors have arrived.

        Returns the problem of the serialized SnapshotManifest, or an empty string, and the serialized SnapshotReady.
        """
        parsed = weights_pb2.SnapshotManifest.FromString(manifest)
        if problem := self._checker.problem(parsed):
            return problem, b""
        is_adapter = parsed.snapshot.kind == weights_pb2.SNAPSHOT_KIND_ADAPTER
        if not is_adapter:
            problem = base_sharing.problem() or weight_loading.problem(self.model_runner.get_model())
        if problem:
            return problem, b""
        finish: Callable[[Arrival], Any] = self._bank.build if is_adapter else lambda arrival: arrival
        ready = sampler_pb2.SnapshotReady()
        if self._receiver.is_split(group_id):
            ready = self._splits.ready(parsed)
        self._receiver.start_receive(task_id, group_id, parsed, timeout_s, finish, ready)
        return "", ready.SerializeToString()

    def fovea_report(self, task_id: str) -> dict[str, Any]:
        """Returns the report of a task, as `Task.report` does."""
        return self._receiver.report(task_id)

    def fovea_forget_task(self, task_id: str) -> None:
        """Frees the tensors that a task received."""
        self._receiver.forget(task_id)

    def fovea_leave(self, group_id: str) -> None:
        """Leaves a transfer group."""
        self._receiver.leave(group_id)

    def fovea_store_adapter(self, task_id: str, name: str, lora_id: int, digest: str) -> dict[str, Any]:
        """Gives an adapter to vLLM under an unused name and id if it has arrived with that digest.

        Returns the report of the task, as `fovea_report` does, and whether the adapter changes the vision tower. The
        service calls it until all workers are done.
        """
        report = self._receiver.report(task_id)
        if report["phase"] == "done" and report["digest"] == digest:
            adapter = self._receiver.arrival(task_id)
            self._bank.keep(name, lora_id, adapter)
            report["in_tower"] = "yes" if adapter.plan.in_tower else ""
        return report

    def fovea_forget_adapter(self, name: str) -> None:
        """Frees an adapter that no request uses."""
        self._bank.forget(name)


def _left_out(model: Any, names: Iterable[str]) -> set[str]:
    """Returns the checkpoint's tensors that a push may omit.

    These are layers for multi-token prediction, which vLLM does not load: Qwen3.5's have a name of their own, GLM-4.5's
    are numbered after the model's last layer; and those that the trainer does not hold.
    """
    mapper, text = getattr(model, "hf_to_vllm_mapper", None), model.config.get_text_config()
    named = {name for name in names if mapper is not None and mapper.map_name(name) is None}
    untrained = {name for name in names if name.startswith(UNTRAINED)}
    return named | names_after(names, text.num_hidden_layers) | untrained


def _adaptable_modules(manager: Any) -> dict[str, torch.nn.Module]:
    """Returns the modules that support LoRA by vLLM name, without embeddings.

    A packed projection appears under the name of each projection that it packs. vLLM wraps a module in its parent. If
    another module holds it too and computes with it, as experts do with their router and latent attention with
    `kv_b_proj`, the adapter would have no effect, so such modules are left out.
    """
    from vllm.lora.layers import BaseLayerWithLoRA, VocabParallelEmbeddingWithLoRA

    parents = (module for module in manager.model.modules() if not isinstance(module, BaseLayerWithLoRA))
    unwrapped = {child for parent in parents for child in parent.children()}
    adaptable: dict[str, torch.nn.Module] = {}
    for name, module in manager.modules.items():
        if not isinstance(module, VocabParallelEmbeddingWithLoRA) and module.base_layer not in unwrapped:
            adaptable |= dict.fromkeys(manager.packed_modules.get(name, [name]), module)
    return adaptable


def _expert_sizes(manager: Any) -> dict[str, ExpertSizes | str]:
    """Returns the sizes of experts, summed over all workers, or why they do not support LoRA, by vLLM name."""
    from vllm.lora.layers import FusedMoEWithLoRA

    found: dict[str, ExpertSizes | str] = {**vllm_patches.model_classes.unadapted_experts(manager.model)}
    for name, module in manager.modules.items():
        if isinstance(module, FusedMoEWithLoRA):
            config = module.moe_config
            inner = config.intermediate_size_per_partition_unpadded * module.tp_size
            found[name] = (config.num_logical_experts, inner, config.hidden_dim_unpadded)
    return found
