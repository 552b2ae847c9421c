"""What Fovea adds to vLLM's worker. The service reaches each method by name through `collective_rpc`.

Importing this module prepares the worker's process: vLLM does so before it makes the worker.
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
from fovea.runtime.children import die_with_parent
from fovea_services.sampler import vllm_patches
from fovea_services.sampler.engine import weight_loading
from fovea_services.sampler.engine.adapter_bank import AdapterBank
from fovea_services.sampler.engine.manifest_check import ExpertSizes, ManifestChecker, check_biases, checkpoint_shapes
from fovea_services.sampler.engine.snapshot_receiver import Arrival, SnapshotReceiver
from fovea_services.sampler.engine.vllm_launch import SERVICE_PID_VARIABLE


def _end_with_service() -> None:
    """Whatever kills the service, this process goes with it."""
    # A terminal's Ctrl-C reaches the whole process group: it is left to the service, which lets requests in flight end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    service, parent = int(os.environ.get(SERVICE_PID_VARIABLE, "1")), os.getppid()
    if service in (1, parent):
        return
    # One of several workers: their parent is vLLM's engine, which would outlive the service.
    try:
        ends = os.pidfd_open(service), os.pidfd_open(parent)
    except ProcessLookupError:
        os._exit(1)
    threading.Thread(target=_end_engine_after, args=ends, name="end-with-service", daemon=True).start()


def _end_engine_after(service: int, engine: int) -> None:
    """Waits until one process ends and kills the other, both by their descriptors; the engine's workers end with it."""
    select.select([service], [], [])
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(engine, signal.SIGKILL)
    os._exit(1)


_end_with_service()
weight_loading.register()
vllm_patches.before_model()


class WorkerExtension:
    """Mixed into vLLM's worker class by `worker_extension_cls`."""

    model_runner: Any
    weight_transfer_engine: Any
    device: torch.device
    rank: int

    def fovea_prepare(self, checkpoint: str) -> tuple[str, int]:
        """Once, after the model is loaded: adapters from memory, snapshots, and the logprobs that Fovea promises.

        Returns why the experts of tokens cannot be told, or the empty string, and the bytes of those of one token.
        """
        self._receiver = SnapshotReceiver(self.device, self.rank)
        model, shapes = self.model_runner.get_model(), checkpoint_shapes(Path(checkpoint))
        rename, left_out = _rename_of(model), _left_out(model, shapes)
        adaptable: dict[str, torch.nn.Module] = {}
        sizes: dict[str, ExpertSizes] = {}
        max_rank = 0
        if self.model_runner.lora_config is not None:
            manager = self.model_runner.lora_manager
            adaptable, max_rank = _adaptable_modules(manager._adapter_manager), manager.lora_config.max_lora_rank
            sizes = _expert_sizes(manager._adapter_manager)
            self._bank = AdapterBank(manager)  # from here on vLLM's manager no longer shows its modules
        check_biases(shapes, rename, adaptable)
        self._checker = ManifestChecker(shapes, rename, left_out, set(adaptable), max_rank, sizes)
        self.weight_transfer_engine.init_transfer_engine(weight_loading.ArrivalInitInfo(self._receiver.arrival))
        vllm_patches.after_model(self.model_runner)
        experts = self.model_runner.fovea_experts
        return experts.problem, experts.row_bytes

    def fovea_cache_bytes(self) -> int:
        """Of this worker's KV cache if vLLM has sized it itself, as it does on a GPU, else 0."""
        return int(getattr(self, "available_kv_cache_memory_bytes", 0))

    def fovea_join(self, task_id: str, request: bytes, backend: str) -> None:
        """Begins to join the group of a serialized JoinTransferGroupRequest; `fovea_report` tells when it stands."""
        self._receiver.start_join(task_id, sampler_pb2.JoinTransferGroupRequest.FromString(request), backend)

    def fovea_check(self, manifest: bytes) -> str:
        """What is wrong with a serialized SnapshotManifest, or the empty string."""
        return self._checker.problem(weights_pb2.SnapshotManifest.FromString(manifest))

    def fovea_receive(self, task_id: str, group_id: str, manifest: bytes, timeout_s: float) -> str:
        """Begins to receive a snapshot; `fovea_report` tells when it is whole.

        Returns what is wrong with the serialized SnapshotManifest, or the empty string.
        """
        parsed = weights_pb2.SnapshotManifest.FromString(manifest)
        if problem := self._checker.problem(parsed):
            return problem
        is_adapter = parsed.snapshot.kind == weights_pb2.SNAPSHOT_KIND_ADAPTER
        if not is_adapter and (problem := weight_loading.problem(self.model_runner.get_model())):
            return problem
        finish: Callable[[Arrival], Any] = self._bank.build if is_adapter else lambda arrival: arrival
        self._receiver.start_receive(task_id, group_id, parsed, timeout_s, finish)
        return ""

    def fovea_report(self, task_id: str) -> dict[str, str]:
        """How far a task is: phase, error, digest."""
        return self._receiver.report(task_id)

    def fovea_forget_task(self, task_id: str) -> None:
        """Frees what a task received."""
        self._receiver.forget(task_id)

    def fovea_leave(self, group_id: str) -> None:
        self._receiver.leave(group_id)

    def fovea_keep_adapter(self, task_id: str, name: str, lora_id: int, digest: str) -> dict[str, str]:
        """Makes an adapter known to vLLM under an unused name and id if it has arrived with that digest.

        Returns what `fovea_report` does. To be called until all workers have it.
        """
        report = self._receiver.report(task_id)
        if report["phase"] == "done" and report["digest"] == digest:
            self._bank.keep(name, lora_id, self._receiver.arrival(task_id))
        return report

    def fovea_forget_adapter(self, name: str) -> None:
        """Frees an adapter that no request uses."""
        self._bank.forget(name)


def _rename_of(model: torch.nn.Module) -> Any:
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return lambda name: name
    renamer = mapper.get_rename_mapper()
    return lambda name: renamer.map_name(name) or name


def _left_out(model: torch.nn.Module, names: Iterable[str]) -> set[str]:
    """Which tensors of the checkpoint vLLM does not load, as the layers with which Qwen3.5 guesses further tokens."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    return {name for name in names if mapper is not None and mapper.map_name(name) is None}


def _adaptable_modules(manager: Any) -> dict[str, torch.nn.Module]:
    """Modules that take LoRA by vLLM name, packed projections by their parts' names; embeddings do not count."""
    from vllm.lora.layers import VocabParallelEmbeddingWithLoRA

    adaptable: dict[str, torch.nn.Module] = {}
    for name, module in manager.modules.items():
        if not isinstance(module, VocabParallelEmbeddingWithLoRA):
            adaptable |= dict.fromkeys(manager.packed_modules.get(name, [name]), module)
    return adaptable


def _expert_sizes(manager: Any) -> dict[str, ExpertSizes]:
    """Modules with experts that take LoRA by vLLM name, all workers' parts together."""
    from vllm.lora.layers import FusedMoEWithLoRA

    found: dict[str, ExpertSizes] = {}
    for name, module in manager.modules.items():
        if isinstance(module, FusedMoEWithLoRA):
            config = module.moe_config
            inner = config.intermediate_size_per_partition_unpadded * module.tp_size
            found[name] = (config.num_logical_experts, inner, config.hidden_dim_unpadded)
    return found
