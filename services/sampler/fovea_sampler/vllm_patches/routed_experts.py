"""Returns the experts that computed each token, for requests that ask for them.

Replaces: `load_model` of `vllm.v1.worker.gpu_model_runner.GPUModelRunner` and of its child for CPU, wraps its
    `sample_tokens`, and gives `vllm.v1.core.sched.scheduler.Scheduler` an `aux_output_connector`.
Why: vLLM's `enable_return_routed_experts` works only with the V2 model runner. The patch uses the capture hook that all
    routers have. The hook writes into a buffer that exists before CUDA graphs are captured. For requests that ask for
    their experts, the worker returns the rows in the output field that V2 uses. The scheduler and the front-end process
    of V1 pass that field on as well.
Upstream: vllm-project/vllm has the feature for V2 and refuses the option with V1.
Delete when: `VLLM_USE_V2_MODEL_RUNNER` is removed and V2 runs on a CPU.

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

from fovea_sampler.vllm_patches.fresh_blocks import AsyncZeroingScheduler, ZeroingScheduler

ASKED_KEY = "fovea_routed_experts"
"""The key in vLLM's `extra_args` that is true for a request that asks for its experts."""

_LEAST_ROWS = 64


def configure(config: Any) -> None:
    """Selects a scheduler that passes rows on, for a model with experts.

    Args:
        config: vLLM's complete configuration.
    """
    if config.model_config.is_moe:
        is_async = config.scheduler_config.async_scheduling
        config.scheduler_config.scheduler_cls = AsyncExpertRowsScheduler if is_async else ExpertRowsScheduler


def apply() -> None:
    """Makes the platform's model runner record experts as soon as its model is loaded. It may be called twice."""
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
    """A recorder of the experts that the routers of a runner's model choose.

    Attributes:
        problem: The reason why experts cannot be recorded, or an empty string.
        row_bytes: The bytes of the expert ids of one token; 0 if they cannot be recorded.
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
                # With asynchronous scheduling, the output is wrapped until its tokens have been copied from the device.
                whole = getattr(output, "_model_runner_output", output)
                whole.aux_output_connector_output = rows
            return output

        self._runner.sample_tokens = sample

    def _rows_of_step(self, num_scheduled_tokens: dict[str, int]) -> dict[str, AuxRequestOutput]:
        """Collects the rows of a step; returns all unsent rows of the requests that draw a token in this step."""
        requests = self._runner.requests
        asked = {name: rows for name in num_scheduled_tokens if (rows := _rows_of(requests[name], self._chosen_TLK))}
        if not asked:
            return {}
        # One copy for all requests, because the host waits for the device at each copy.
        chosen_TLK = self._chosen_TLK[: sum(num_scheduled_tokens.values())].cpu().numpy()
        found = {}
        for name, rows in asked.items():
            index, count = self._runner.input_batch.req_id_to_index[name], num_scheduled_tokens[name]
            first, start = self._runner.query_start_loc.np[index].item(), requests[name].num_computed_tokens
            rows.put(start, chosen_TLK[first : first + count])
            # vLLM passes on outputs of a request only in steps that draw a token for it.
            if not self._runner.discard_request_mask.np[index]:
                found[name] = AuxRequestOutput(*rows.take(start + count))
        return found


class _Rows:
    """The rows of one request, by position. Rows that are computed again after a preemption are sent only once."""

    def __init__(self, like_TLK: Tensor) -> None:
        self._rows = np.zeros((_LEAST_ROWS, *like_TLK.shape[1:]), torch.empty(0, dtype=like_TLK.dtype).numpy().dtype)
        self._sent = 0

    def put(self, start: int, rows: npt.NDArray[Any]) -> None:
        """Stores the rows of the positions from `start` on."""
        end = start + len(rows)
        if end > len(self._rows):
            grown = np.zeros((max(end, 2 * len(self._rows)), *self._rows.shape[1:]), self._rows.dtype)
            grown[: len(self._rows)] = self._rows
            self._rows = grown
        self._rows[start:end] = rows

    def take(self, end: int) -> tuple[int, npt.NDArray[Any]]:
        """Returns the rows up to position `end` that were not taken before, preceded by their first position."""
        start, self._sent = self._sent, max(self._sent, end)
        return start, self._rows[start:end].copy()


def _rows_of(request: Any, like_TLK: Tensor) -> _Rows | None:
    """Returns the rows of a request, or None if it does not ask for them.

    They are an attribute of the runner's record of the request, so they end with it.
    """
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
            "the engine cannot return experts with data, pipeline or sequence parallelism, with batches in two halves, "
            "or with speculative decoding"
        )
    for layer in layers:
        if layer.is_monolithic or not isinstance(layer.router, BaseRouter):
            kernel = type(layer.routed_experts.quant_method).__name__
            return f"vLLM's kernel for experts, {kernel}, does not return the choice of its router"
    return ""


class _RowsConnector:
    """The connector that vLLM's scheduler asks for rows. The workers send them unasked."""

    def build_connector_meta(self, scheduler_output: Any, requests: Any) -> None:
        """Returns None: workers need no information from the scheduler."""

    def max_cache_hit(self, request: Any) -> int:
        """Returns the most tokens that a request may read from the cache: vLLM's own limit. vLLM 0.33 asks for it."""
        return int(request.num_tokens) - 1

    def take_output(self, request: Any, output: dict[str, AuxRequestOutput] | None) -> npt.NDArray[Any] | None:
        """Returns the rows of a request; None if it did not ask for them."""
        found = (output or {}).get(request.request_id)
        return None if found is None else found.rows

    def request_finished(self, request: Any) -> None:
        """Does nothing: the connector has no state."""

    def reset(self) -> None:
        """Does nothing: the connector has no state."""


class ExpertRowsScheduler(ZeroingScheduler):
    """A ZeroingScheduler that passes the rows of experts on."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.aux_output_connector = _RowsConnector()


class AsyncExpertRowsScheduler(AsyncZeroingScheduler):
    """An AsyncZeroingScheduler that passes the rows of experts on."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.aux_output_connector = _RowsConnector()
