"""The experts that computed each token of a request that asks for them.

Replaces: `load_model` of `vllm.v1.worker.gpu_model_runner.GPUModelRunner` and of its child for CPU, wraps its
    `sample_tokens`, and gives `vllm.v1.core.sched.scheduler.Scheduler` an `aux_output_connector`.
Why: `enable_return_routed_experts` is wired to the V2 runner alone. Here the hook that all routers have writes into a
    buffer that is there before graphs are captured; rows of requests that ask leave the worker in the field of V2's,
    which the scheduler and the front process of V1 carry as well.
Upstream: vllm-project/vllm has it for V2; vLLM refuses it by name elsewhere.
Delete when: `VLLM_USE_V2_MODEL_RUNNER` goes, and V2 runs on CPU.

Shapes: T tokens of a step, L layers with experts, K experts of a token.
"""

# ruff: noqa: N803, N806 -- the suffix of a tensor's name is its shape

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from vllm.distributed.aux_output_connector.connector import AuxRequestOutput
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.platforms import current_platform

from fovea_services.sampler.vllm_patches.fresh_blocks import AsyncZeroingScheduler, ZeroingScheduler

ASKED_KEY = "fovea_routed_experts"
"""Is true in vLLM's `extra_args` of a request that asks."""

_LEAST_ROWS = 64


def configure(config: Any) -> None:
    """Has the scheduler of a model with experts pass rows on. To be called with vLLM's configuration, complete."""
    if config.model_config.is_moe:
        is_async = config.scheduler_config.async_scheduling
        config.scheduler_config.scheduler_cls = AsyncPassingScheduler if is_async else PassingScheduler


def apply() -> None:
    """Has the platform's model runner note experts from the moment that its model is loaded; twice is no error."""
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_model_runner import CPUModelRunner as Runner
    else:
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner as Runner
    if getattr(Runner.load_model, "notes_experts", False):
        return
    load_model: Any = Runner.load_model

    def load(runner: Any, *arguments: Any, **options: Any) -> None:
        load_model(runner, *arguments, **options)
        runner.fovea_experts = ExpertRecorder(runner)

    load.notes_experts = True  # type: ignore[attr-defined]
    Runner.load_model = load


class ExpertRecorder:
    """Notes which experts the routers of a runner's model choose.

    Attributes:
        problem: Why none can be told, or the empty string.
        row_bytes: What those of one token take.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        layers = sorted(
            (module for module in runner.get_model().modules() if isinstance(module, MoERunner)),
            key=lambda module: module.layer_id,
        )
        self.problem, self.row_bytes = _problem(runner, layers), 0
        if self.problem:
            return
        config = layers[0].moe_config
        dtype = torch.uint8 if config.num_experts <= 256 else torch.int32
        shape = (runner.max_num_tokens, len(layers), config.experts_per_token)
        self._chosen_TLK = torch.zeros(shape, dtype=dtype, device=runner.device)
        self.row_bytes = self._chosen_TLK[0].nbytes
        for place, layer in enumerate(layers):
            layer.router.set_capture_fn(partial(self._note, place))
        self._install()

    def _note(self, place: int, ids_TK: Tensor) -> None:
        self._chosen_TLK[: len(ids_TK), place] = ids_TK

    def _install(self) -> None:
        sample_tokens = self._runner.sample_tokens

        def sample(grammar_output: Any) -> Any:
            state = self._runner.execute_model_state
            rows = self._rows_of_step(state[0].num_scheduled_tokens) if state is not None else {}
            output = sample_tokens(grammar_output)
            if rows:
                # With asynchronous scheduling the output is wrapped until its tokens have left the device.
                whole = getattr(output, "_model_runner_output", output)
                whole.aux_output_connector_output = rows
            return output

        self._runner.sample_tokens = sample

    def _rows_of_step(self, num_scheduled_tokens: dict[str, int]) -> dict[str, AuxRequestOutput]:
        """Takes the rows of a step; returns those of requests that draw a token in it, with what they held back."""
        requests = self._runner.requests
        asked = {name: rows for name in num_scheduled_tokens if (rows := _rows_of(requests[name], self._chosen_TLK))}
        if not asked:
            return {}
        # One copy for all of them: the host waits for the device each time.
        chosen_TLK = self._chosen_TLK[: sum(num_scheduled_tokens.values())].cpu().numpy()
        found = {}
        for name, rows in asked.items():
            index, count = self._runner.input_batch.req_id_to_index[name], num_scheduled_tokens[name]
            first, start = self._runner.query_start_loc.np[index].item(), requests[name].num_computed_tokens
            rows.put(start, chosen_TLK[first : first + count])
            # vLLM speaks of a request only in steps that draw a token of it.
            if not self._runner.discard_request_mask.np[index]:
                found[name] = AuxRequestOutput(*rows.take(start + count))
        return found


class _Rows:
    """The rows of one request, by position: what is computed again after a preemption is sent once."""

    def __init__(self, like_TLK: Tensor) -> None:
        self._rows = np.zeros((_LEAST_ROWS, *like_TLK.shape[1:]), torch.empty(0, dtype=like_TLK.dtype).numpy().dtype)
        self._sent = 0

    def put(self, start: int, rows: npt.NDArray[Any]) -> None:
        end = start + len(rows)
        if end > len(self._rows):
            grown = np.zeros((max(end, 2 * len(self._rows)), *self._rows.shape[1:]), self._rows.dtype)
            grown[: len(self._rows)] = self._rows
            self._rows = grown
        self._rows[start:end] = rows

    def take(self, end: int) -> tuple[int, npt.NDArray[Any]]:
        """The first position, and the rows, of those up to `end` that were not taken yet."""
        start, self._sent = self._sent, max(self._sent, end)
        return start, self._rows[start:end].copy()


def _rows_of(request: Any, like_TLK: Tensor) -> _Rows | None:
    """Rows under way, if the request asks; they live as long as the runner's record of it."""
    if not hasattr(request, "fovea_rows"):
        arguments = (request.sampling_params and request.sampling_params.extra_args) or {}
        request.fovea_rows = _Rows(like_TLK) if arguments.get(ASKED_KEY) else None
    rows: _Rows | None = request.fovea_rows
    return rows


def _problem(runner: Any, layers: list[Any]) -> str:
    if not layers:
        return "the model has no experts"
    parallel = runner.parallel_config
    spread = parallel.data_parallel_size > 1 or parallel.pipeline_parallel_size > 1 or layers[0].moe_config.sp_size > 1
    if spread or parallel.use_ubatching or runner.speculative_config:
        return (
            "the engine does not tell them with data, pipeline or sequence parallelism, batches in two halves, or "
            "speculative decoding"
        )
    for layer in layers:
        if layer.is_monolithic or not isinstance(layer.router, BaseRouter):
            return f"vLLM's kernel for them, {type(layer.routed_experts.quant_method).__name__}, does not tell them"
    return ""


class _Passing:
    """What a scheduler asks about rows, where workers send them by themselves."""

    def build_connector_meta(self, scheduler_output: Any, requests: Any) -> None:
        """Workers need to know nothing."""

    def take_output(self, request: Any, output: dict[str, AuxRequestOutput] | None) -> npt.NDArray[Any] | None:
        """What came of a request; None if it did not ask."""
        found = (output or {}).get(request.request_id)
        return None if found is None else found.rows

    def request_finished(self, request: Any) -> None:
        """Nothing is kept here."""

    def reset(self) -> None:
        """Nothing is kept here."""


class PassingScheduler(ZeroingScheduler):
    """vLLM's, and passes rows on."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.aux_output_connector = _Passing()


class AsyncPassingScheduler(AsyncZeroingScheduler):
    """vLLM's, and passes rows on."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.aux_output_connector = _Passing()
