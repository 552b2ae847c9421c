"""Implements the engine protocols of `engine_api` with vLLM's AsyncLLM."""

import asyncio
import itertools
import json
import logging
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
from vllm.exceptions import VLLMClientError
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

from fovea.api.v1 import sampler_pb2, weights_pb2
from fovea.wire.errors import DeadlineExceeded, Internal, InvalidInput, Unavailable
from fovea.wire.manifest import joined_digest
from fovea.wire.tensors import FeatureTensors
from fovea_sampler import sampler_metrics
from fovea_sampler.engine import request_conversion
from fovea_sampler.engine.openai_serving import OpenAIServing
from fovea_sampler.engine.vllm_launch import push_room
from fovea_sampler.engine_api import AdapterName, Event, Limits, SampleSpec
from fovea_sampler.grammar_trials import FIELD as STRUCTURE_FIELD
from fovea_sampler.grammar_trials import TOO_SLOW, GrammarTrials
from fovea_sampler.settings import SamplerSettings
from fovea_sampler.vllm_patches.lora_memory import request_of

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

# Each poll calls every worker between two engine steps. Polls are frequent at first, because adapters arrive quickly.
_FASTEST_POLL_S = 0.001
_SLOWEST_POLL_S = 0.01
_NOT_ARRIVED = "the snapshot did not arrive"


class Engine:
    """The SampleEngine and WeightEngine over vLLM; `engine_api` documents their methods.

    Call all methods from one event loop. They raise Fovea's errors, not vLLM's.
    """

    def __init__(self, llm: "AsyncLLM", settings: SamplerSettings, checkpoint: Path) -> None:
        self._llm = llm
        self._settings = settings
        self._checkpoint = checkpoint
        self._task_numbers = itertools.count(1)
        self._arriving: dict[str, weights_pb2.SnapshotManifest] = {}
        self._kept_caches = 0
        self._in_tower: set[str] = set()
        self._experts_problem, self._expert_row_bytes = "the engine is not ready", 0
        self._prompts = request_conversion.PromptMaker.of(llm)
        self._eos_token_ids = _eos_token_ids(llm, checkpoint)
        self._grammars = GrammarTrials(lambda: _tokenizer_info(llm))

    async def prepare(self) -> None:
        """Prepares the workers. Call it once, before any other method."""
        envs.enable_envs_cache()  # otherwise vLLM reads environment variables for every token
        (self._experts_problem, self._expert_row_bytes), *_ = await self._command(
            "fovea_prepare", str(self._checkpoint)
        )
        with _translated():
            await self._llm.update_weight_version("")  # labels are snapshot ids; this is the base model's
        await self._log_cache()

    async def _log_cache(self) -> None:
        """Logs the size of the KV cache and of the memory reserved for pushes. Logs nothing on a CPU."""
        if not (cache_bytes := min(await self._command("fovea_cache_bytes"))):
            return
        tokens, room = self._llm.vllm_config.cache_config.kv_cache_size_tokens, push_room(self._settings)
        said = "pushed full weights wait in pinned host memory if the GPU has no room"
        if room:
            said = (
                f"{room / 2**30:.1f} GiB of each GPU are reserved for pushed full weights; with --full-push-room never "
            )
            said += f"the cache would hold {tokens * room // cache_bytes:,} more tokens"
        logger.info("KV cache: %s tokens; %s", f"{tokens:,}", said)

    @property
    def config(self) -> dict[str, Any]:
        """The model's Hugging Face configuration."""
        config: dict[str, Any] = self._llm.model_config.hf_config.to_dict()
        return config

    @property
    def dtype(self) -> str:
        """The element type of the weights, such as float32."""
        return str(self._llm.model_config.dtype).removeprefix("torch.")

    @property
    def transfer_backend(self) -> str:
        """The transport of pushed weights: gloo, nccl or cuda_ipc."""
        if self._settings.transfer != "auto":
            return self._settings.transfer
        return "gloo" if self._llm.vllm_config.device_config.device_type == "cpu" else "nccl"

    @property
    def worker_count(self) -> int:
        """The number of workers that join a transfer group."""
        return int(self._llm.vllm_config.parallel_config.world_size)

    @property
    def limits(self) -> Limits:
        """The largest request that the engine accepts."""
        return Limits(
            vocabulary_size=self._llm.model_config.get_vocab_size(),
            max_context=self._llm.model_config.max_model_len,
            max_sample_count=self._settings.max_sample_count,
            max_top_logprobs=self._settings.max_top_logprobs,
            max_images=self._settings.max_images,
            max_image_tokens=self._llm.input_processor.mm_encoder_cache_size,
            expert_row_bytes=self._expert_row_bytes,
            experts_problem=self._experts_problem,
        )

    @property
    def dead(self) -> bool:
        """True once the engine has died; it cannot be restarted in this process."""
        return bool(self._llm.errored)

    def openai_serving(self) -> OpenAIServing:
        """Returns the object that answers OpenAI's API. Raises ValueError or TypeError for an unknown tool parser."""
        end_ids = (*self._eos_token_ids, self._llm.renderer.get_eos_token_id())
        return OpenAIServing(self._llm, self._settings.tool_parser, end_ids)

    def shutdown(self) -> None:
        """Ends the engine's processes."""
        self._grammars.close()
        self._llm.shutdown()

    def prompt(self, spec: SampleSpec, images: Sequence[FeatureTensors]) -> Any:
        return self._prompts.make(spec, images, self._kept_caches)

    async def sample(
        self, spec: SampleSpec, index: int, prompt: Any, adapter: AdapterName | None
    ) -> AsyncGenerator[Event]:
        plan = request_conversion.score_plan(spec, index)
        structure = request_conversion.structure_of(spec.params.structured_outputs)
        if structure is not None:
            await self._grammars.check(structure.kind, structure.text, spec.request.cache_salt)
        with _translated(STRUCTURE_FIELD if structure is not None else None):
            generated = self._llm.generate(
                prompt,
                request_conversion.sampling_params(
                    spec, index, self._eos_token_ids, plan, structure and structure.params
                ),
                f"{spec.request.request_id}/{index}",
                lora_request=self._reference_to(adapter),
            )
            async with aclosing(generated) as results:
                first = True
                async for result in results:
                    if structure is not None and result.outputs[0].finish_reason == "error":
                        raise InvalidInput(
                            f"{STRUCTURE_FIELD}: the engine ended the request, since its {structure.kind} {TOO_SLOW}",
                            field=STRUCTURE_FIELD,
                        )
                    if first:
                        yield request_conversion.prompt_result(result, spec, plan)
                        first = False
                    for delta in request_conversion.deltas(result, spec, index, adapter is not None):
                        yield delta

    def _reference_to(self, adapter: AdapterName | None) -> Any:
        if adapter is None:
            return None
        return request_of(adapter.name, adapter.lora_id, adapter.name in self._in_tower)

    async def join_group(self, request: sampler_pb2.JoinTransferGroupRequest) -> None:
        task_id = self._new_task()
        await self._command("fovea_join", task_id, request.SerializeToString(), self.transfer_backend)
        try:
            unmet = f"transfer group {request.group_id} did not meet"
            await self._wait(unmet, request.timeout_s, "fovea_report", task_id)
        finally:
            await self.forget_task(task_id)

    async def leave_group(self, group_id: str) -> None:
        await self._command("fovea_leave", group_id)

    async def check(self, manifest: weights_pb2.SnapshotManifest) -> None:
        _refuse(await self._command("fovea_check", manifest.SerializeToString()))

    async def start_receive(
        self, group_id: str, manifest: weights_pb2.SnapshotManifest, timeout_s: float
    ) -> tuple[str, sampler_pb2.SnapshotReady]:
        task_id = self._new_task()
        results: list[tuple[str, bytes]] = await self._command(
            "fovea_receive", task_id, group_id, manifest.SerializeToString(), timeout_s
        )
        _refuse([problem for problem, _ in results])
        self._arriving[task_id] = manifest
        return task_id, sampler_pb2.SnapshotReady.FromString(results[0][1])

    async def wait_received(self, task_id: str, timeout_s: float) -> str:
        manifest = self._arriving[task_id]
        return _digest(await self._wait(_NOT_ARRIVED, timeout_s, "fovea_report", task_id), manifest)

    async def forget_task(self, task_id: str) -> None:
        self._arriving.pop(task_id, None)
        await self._command("fovea_forget_task", task_id)

    async def store_adapter(self, task_id: str, adapter: AdapterName, digest: str, timeout_s: float) -> str:
        keep = ("fovea_store_adapter", task_id, adapter.name, adapter.lora_id, digest)
        reports = await self._wait(_NOT_ARRIVED, timeout_s, *keep)
        if any(report.get("in_tower") for report in reports):
            self._in_tower.add(adapter.name)
        return _digest(reports, self._arriving[task_id])

    async def forget_adapter(self, adapter: AdapterName) -> None:
        self._in_tower.discard(adapter.name)
        await self._command("fovea_forget_adapter", adapter.name)

    async def load_full(self, task_id: str, version: str) -> float:
        """See `WeightEngine`.

        The engine stays paused after a failure, because a step of a half-loaded model kills it.
        """
        start = time.monotonic()
        timeout_s = self._settings.engine_timeout_s
        with _translated():
            # The limit covers five calls of the engine. Two can be slow: the pause, which waits for the engine's step,
            # and the update.
            async with asyncio.timeout(4 * timeout_s):
                is_in_flight = self._llm.output_processor.has_unfinished_requests()
                keeps = is_in_flight and self._settings.inflight_cache == "keep"
                # Clearing preempts the running requests: they are computed again from their first token.
                await self._llm.pause_generation(mode="keep", clear_cache=not keeps)
                self._kept_caches += keeps
                await self._llm.start_weight_update()
                await self._llm.update_weights(WeightTransferUpdateRequest(update_info={"task_id": task_id}))
                await self._llm.finish_weight_update(version)
                await self._llm.resume_generation()
        return time.monotonic() - start

    async def _wait(self, what: str, timeout_s: float, method: str, *arguments: object) -> list[dict[str, Any]]:
        """Polls a reporting method of all workers until their tasks are done; returns the reports.

        Raises Unavailable, with `what` as the message, if a task fails or takes longer than `timeout_s`.
        """
        begun = time.monotonic()
        while True:
            reports: list[dict[str, Any]] = await self._command(method, *arguments)
            failed = [report["error"] for report in reports if report["phase"] == "failed"]
            if failed:
                raise Unavailable(f"{what}: {failed[0]}")
            if all(report["phase"] == "done" for report in reports):
                return reports
            waited_s = time.monotonic() - begun
            if waited_s > timeout_s:
                raise Unavailable(f"{what} within {timeout_s:.1f} s")
            await asyncio.sleep(min(max(waited_s / 8, _FASTEST_POLL_S), _SLOWEST_POLL_S))

    async def _command(self, method: str, *arguments: object) -> list[Any]:
        """Calls a method on all workers, with the deadline `engine_timeout_s`; returns their results."""
        with _translated():
            async with asyncio.timeout(self._settings.engine_timeout_s):
                results: list[Any] = await self._llm.collective_rpc(method, args=arguments)
                return results

    def _new_task(self) -> str:
        return f"task-{next(self._task_numbers)}"


@contextmanager
def _translated(field: str | None = None) -> Iterator[None]:
    """Converts vLLM's errors into Fovea's. `field` is the one at fault if vLLM refuses a request.

    From 0.33 on, vLLM refuses a request with a grammar that does not compile; 0.32 ends it with the reason "error".
    """
    try:
        yield
    except EngineDeadError as error:
        raise Unavailable("the engine has died; this sampler is about to exit") from error
    except VLLMClientError as error:
        # Unexpected, because `sample_validation` should have refused the request. The caller still has to change it.
        logger.warning("vLLM refused a request that Fovea's validation had accepted: %s", error)
        raise InvalidInput(f"the engine refused the request: {error}", field=field) from error
    except TimeoutError as error:
        raise DeadlineExceeded("the engine did not answer in time") from error


def _refuse(problems: list[str]) -> None:
    """Raises InvalidInput if any worker reports a problem of a manifest."""
    if problem := next(filter(None, problems), ""):
        raise InvalidInput(f"manifest: {problem}", field="manifest")


def _digest(reports: list[dict[str, Any]], manifest: weights_pb2.SnapshotManifest) -> str:
    """Returns the digest of all tensors that the workers received. Raises Internal if those of two should be equal."""
    for worker, report in enumerate(reports):
        sampler_metrics.RECEIVED_BYTES.labels(str(worker)).inc(report["size_bytes"])
    digests: set[str] = {report["digest"] for report in reports}
    if digests == {""}:
        try:
            return joined_digest(manifest.tensors, [report["sums"] for report in reports])
        except ValueError as error:
            raise Internal(str(error)) from None
    if len(digests) != 1:
        raise Internal(f"the engine's workers received different tensors: {sorted(digests)}")
    return digests.pop()


def _tokenizer_info(llm: "AsyncLLM") -> str:
    """Returns xgrammar's TokenizerInfo as JSON, made exactly as vLLM makes its own."""
    config = llm.vllm_config
    backend = XgrammarBackend(config, llm.renderer.get_tokenizer(), config.model_config.get_vocab_size())
    info: str = backend.compiler.compile_regex("a").tokenizer_info.serialize_json()
    return info


def _eos_token_ids(llm: "AsyncLLM", checkpoint: Path) -> tuple[int, ...]:
    """Returns the ids that end a sequence besides the tokenizer's end token.

    vLLM stops only at the tokenizer's end token, but the generation_config.json of many checkpoints lists two ids.
    """
    found: set[int] = set()
    generation = checkpoint / "generation_config.json"
    if generation.is_file():
        named = json.loads(generation.read_text()).get("eos_token_id")
        found.update(named if isinstance(named, list) else [named] if named is not None else [])
    own = llm.renderer.get_eos_token_id()
    return tuple(sorted(found - {own}))
