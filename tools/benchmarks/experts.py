"""Compares kernels with torch operators for a layer's experts, forward and backward: `python -m benchmarks.experts`.

The shape is a layer of Qwen3-30B-A3B with LoRA 32 on a frozen base and a router of random choices. The two ways
alternate, so that the GPU's clock is the same for both. The work between the matrix products is also timed alone.
First, the outputs and gradients of both are compared: the largest difference relative to the largest value, and the
difference of their norms. With `--blocks` the kernels around the gate are timed for several block sizes. On a CPU,
which has no kernels, only torch's operators are timed.
"""

# ruff: noqa: N806, N815 -- the suffix of a tensor's name is its shape

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.figure import emit
from fovea_trainer.model.expert_routing import Routing, computed_with_kernels
from fovea_trainer.model.experts import ExpertAdapter, experts_forward, gated
from fovea_trainer.model.lora import LoraInjector, LoraSettings, LoraWeights
from fovea_trainer.model.model_family import LoraTarget, Role

_WARM_UPS = 3
BLOCKS: tuple[tuple[int, int, int, int | None], ...] = (
    *((64, 32, 8, None), (64, 32, 8, 128), (64, 32, 4, None), (64, 32, 4, 168), (64, 64, 8, None), (64, 64, 8, 128)),
    *((64, 64, 16, None), (32, 32, 4, None), (32, 32, 4, 128), (128, 32, 8, None), (128, 32, 16, None)),
)
"""Copies, columns, warps and registers of a kernel program, as tried by `--blocks`."""


@dataclass(frozen=True)
class Case:
    """A layer with random weights, and random inputs for it.

    Attributes:
        experts: Module of transformers with an adapter.
        adapter: The adapter.
        hidden_TD: Input that requires a gradient, like `weight_TK`.
        index_TK: Experts of each token.
        weight_TK: Weights of these experts.
        direction_TD: Gradient of the output.
    """

    experts: Any
    adapter: ExpertAdapter
    hidden_TD: Tensor
    index_TK: Tensor
    weight_TK: Tensor
    direction_TD: Tensor

    @classmethod
    def random(cls, options: argparse.Namespace) -> "Case":
        """Returns a case with the sizes of the command's options."""
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

        torch.manual_seed(options.seed)
        dtype = getattr(torch, options.dtype)
        sizes = {"hidden_size": options.hidden, "moe_intermediate_size": options.inner, "num_experts": options.experts}
        with torch.device(options.device):
            experts: nn.Module = Qwen3MoeExperts(Qwen3MoeConfig(**sizes)).to(dtype).requires_grad_(False)
            for parameter in experts.parameters():
                nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
            targets = [LoraTarget("experts", experts, Role.MLP, False)]
            settings = LoraSettings(options.rank, 32.0, 0, False, True, False, False)
            with torch.device("cpu"):  # its initial values are drawn on the CPU
                weights = LoraWeights(settings, targets, torch.device(options.device), dtype)
            nn.init.normal_(weights.flat, std=0.05)
            LoraInjector(targets).activate(weights)
            scores_TE = torch.rand(options.tokens, options.experts)
            best = scores_TE.topk(options.top_k)
            weight_TK = best.values / best.values.sum(1, keepdim=True)
            hidden_TD, direction_TD = (torch.randn(options.tokens, options.hidden, dtype=dtype) for _ in range(2))
        given = [one.to(dtype).requires_grad_() for one in (hidden_TD, weight_TK)]
        return cls(experts, weights.experts["experts"], given[0], best.indices, given[1], direction_TD)

    def layer(self) -> Tensor:
        """Runs the layer forward and backward."""
        self.hidden_TD.grad = self.weight_TK.grad = None
        output_TD = experts_forward(self.experts, self.hidden_TD, self.index_TK, self.weight_TK)
        torch.autograd.backward(output_TD, self.direction_TD)
        return output_TD

    def results(self) -> dict[str, Tensor]:
        """Returns the output and all gradients, by their names."""
        for factor in self.adapter.factors.values():
            factor.grad.zero_()
        found = {"output": self.layer().detach()}
        for name, one in (("hidden", self.hidden_TD), ("weights", self.weight_TK)):
            assert one.grad is not None
            found[name] = one.grad
        return found | {name: factor.grad.clone() for name, factor in self.adapter.factors.items()}

    def parts(self) -> dict[str, Callable[[], object]]:
        """Returns the operations between the matrix products, each as a function of its own."""
        routing = Routing.of(self.index_TK, self.experts.num_experts)
        rows_SD = self.direction_TD.index_select(0, routing.token_S)
        inner_SG = torch.randn(len(rows_SD), self.experts.gate_up_proj.shape[1]).to(rows_SD)
        lows_TR = [
            self.adapter.low(f"{part}.lora_A", self.hidden_TD, None).detach().requires_grad_() for part in ("w1", "w3")
        ]
        weight_S1 = self.weight_TK.detach().flatten().gather(0, routing.order_S).unsqueeze(-1).requires_grad_()
        leaf_SG = inner_SG.clone().requires_grad_()

        def forward() -> Sequence[Tensor | None]:
            with torch.no_grad():
                # torch's version adds in place, so the same memory is used repeatedly and the values are not those of a
                # layer.
                return gated(inner_SG, weight_S1, lows_TR, routing, self.adapter, self.experts.act_fn)

        def both() -> None:
            for one in (leaf_SG, weight_S1, *lows_TR):
                one.grad = None
            # The target of an in-place addition must not be a leaf. The kernels include the cost of that pass too.
            found = gated(leaf_SG * 1, weight_S1, lows_TR, routing, self.adapter, self.experts.act_fn)
            outputs = [one for one in found if one is not None]
            torch.autograd.backward(outputs, [d_gated_SI, d_low_SR])

        shape = (len(rows_SD), self.experts.down_proj.shape[2])
        d_gated_SI = torch.randn(shape, device=rows_SD.device).to(rows_SD)
        d_low_SR = torch.randn(len(rows_SD), lows_TR[0].shape[1], device=rows_SD.device).to(rows_SD)
        return {
            "copies": lambda: routing.copies(self.direction_TD),
            "sums": lambda: routing.sums(rows_SD),
            "gate": forward,
            "gate_and_gradients": both,
        }


def seconds_of(work: Callable[[], object], device: str) -> float:
    """Returns the seconds of one call, including all work that it started on the device."""
    if device == "cpu":
        begun = time.perf_counter()
        work()
        return time.perf_counter() - begun
    cuda: Any = torch.cuda  # its events have no type stubs
    start, end = (cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    work()
    end.record()
    torch.cuda.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / 1000


def timed(work: Callable[[], object], ways: Sequence[bool], options: argparse.Namespace) -> dict[bool, list[float]]:
    """Returns the seconds of each repeat, with and without kernels, in turns."""
    found: dict[bool, list[float]] = {way: [] for way in ways}
    for repeat in range(-_WARM_UPS, options.repeats):
        for way in ways:
            with computed_with_kernels(way):
                seconds = seconds_of(work, options.device)
            if repeat >= 0:
                found[way].append(seconds)
    return found


def differences(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, tuple[float, float]]:
    """Returns, for each tensor, the largest difference relative to the largest value, and the relative norm of the
    difference.
    """
    answer = {}
    for name, one in expected.items():
        off, values = found[name].double() - one.double(), one.double()
        answer[name] = ((off.abs().max() / values.abs().max()).item(), (off.norm() / values.norm()).item())
    return answer


def compare(case: Case, sizes: Mapping[str, Any]) -> None:
    """Prints how much the two ways differ, and whether the kernels give the same result twice."""
    with computed_with_kernels(False):
        expected = case.results()
    with computed_with_kernels(True):
        found, again = case.results(), case.results()
    for name, (largest, norm) in differences(found, expected).items():
        same = torch.equal(found[name], again[name])
        emit("experts.difference", [largest], "relative", of=name, norm=norm, same_twice=same, **sizes)


def try_blocks(case: Case, options: argparse.Namespace, sizes: Mapping[str, Any]) -> None:
    """Prints the time of the kernels around the gate for each block size."""
    from fovea_trainer.model import expert_kernels as kernels

    routing = Routing.of(case.index_TK, options.experts)
    factors = case.adapter.factors
    lows = [case.adapter.low(f"{part}.lora_A", case.hidden_TD, None).detach() for part in ("w1", "w3")]
    casts = [factors[name].cast for name in ("w1.lora_B", "w3.lora_B", "w2.lora_A")]
    around = kernels.GateAdapter(case.adapter.scale, routing.token_S, routing.expert_S, *lows, *casts)
    weight_S1 = case.weight_TK.detach().flatten().gather(0, routing.order_S).unsqueeze(-1)
    inner_SG = torch.randn(len(weight_S1), 2 * options.inner, device=options.device).to(weight_S1)
    gated_SI, low_SR = kernels.gated(inner_SG, weight_S1, around)
    ways: dict[str, Callable[..., object]] = {
        "forward": partial(kernels.gated, inner_SG, weight_S1, around),
        "backward": partial(kernels.gated_gradients, gated_SI, low_SR, inner_SG, weight_S1, around),
    }
    for name, work in ways.items():
        for given in BLOCKS:
            found = timed(partial(work, blocks=kernels.Blocks(*given)), [True], options)
            emit("experts.blocks", found[True], "s", of=name, blocks=given, **sizes)


def main() -> None:
    """Prints a line of JSON for each figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 12288), ("experts", 128), ("top-k", 8), ("hidden", 2048), ("inner", 768)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("rank", 32), ("repeats", 20), ("seed", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--blocks", action="store_true", help="try several sizes of the kernels' blocks")
    options = parser.parse_args()
    names = ("tokens", "experts", "top_k", "hidden", "inner", "rank", "dtype", "device")
    sizes = {name: getattr(options, name) for name in names}
    case = Case.random(options)
    ways = [False] if options.device == "cpu" else [False, True]
    if True in ways:
        compare(case, sizes)
    for name, work in {"layer": case.layer, **case.parts()}.items():
        found = timed(work, ways, options)
        way = "torch" if ways == [False] else "kernels"
        emit(f"experts.{name}", found[ways[-1]], "s", found[False] if True in ways else None, way=way, **sizes)
    if options.blocks and True in ways:
        try_blocks(case, options, sizes)


if __name__ == "__main__":
    main()
