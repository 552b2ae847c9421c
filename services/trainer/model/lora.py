"""LoRA adapters: small float32 tensors beside the sharded base, injected by hooks, many of them on one base.

All tensors of an adapter are views of one flat buffer, and so are their gradients: one all-reduce, one optimizer
parameter, one copy for a snapshot. Every rank holds the same values.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from hashlib import sha256
from typing import Any, Self

import torch
from torch import Tensor, nn

from fovea.api.v1 import weights_pb2
from fovea.wire.errors import InvalidInput
from services.trainer.model.experts import ExpertAdapter, ExpertMasters, Factor
from services.trainer.model.lora_linear import LoraPair, Trained, shared_products
from services.trainer.model.model_family import LoraTarget, Role

PEFT_PREFIX = "base_model.model."
DEFAULT_ALPHA = 32.0
UNEMBEDDING = "lm_head"


@dataclass(frozen=True)
class LoraSettings:
    """What an adapter adapts; as `LoraConfig` on the wire."""

    rank: int
    alpha: float
    seed: int
    train_attention: bool
    train_mlp: bool
    train_unembedding: bool
    train_vision: bool

    @classmethod
    def of(cls, given: weights_pb2.LoraConfig) -> Self:
        """What a message says; an alpha of 0 is the default."""
        settings = cls(**{field.name: getattr(given, field.name) for field in fields(cls)})
        return settings if settings.alpha else replace(settings, alpha=DEFAULT_ALPHA)

    def message(self) -> weights_pb2.LoraConfig:
        """The same on the wire."""
        return weights_pb2.LoraConfig(**asdict(self))

    @property
    def scale(self) -> float:
        """alpha / rank, the factor of B (A x)."""
        return self.alpha / self.rank

    def check(self, max_rank: int, adapts_vision: bool) -> None:
        """Raises InvalidInput for settings that cannot be honoured; a `max_rank` of 0 is a model's without adapters."""
        if not max_rank:
            raise InvalidInput(
                "lora is set, but vLLM has no LoRA for this model; create one of full parameters", field="lora"
            )
        if not 1 <= self.rank <= max_rank:
            raise InvalidInput(f"lora.rank {self.rank} is not in 1 .. {max_rank}", field="lora.rank")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise InvalidInput(f"lora.alpha {self.alpha} must be positive and finite", field="lora.alpha")
        if not (self.train_attention or self.train_mlp or self.train_unembedding):
            raise InvalidInput(
                "lora trains nothing: set train_attention, train_mlp or train_unembedding", field="lora.train_attention"
            )
        if self.train_vision and not adapts_vision:
            raise InvalidInput(
                "lora.train_vision is set, but the model has no vision tower that adapters can reach",
                field="lora.train_vision",
            )
        if self.train_vision and not (self.train_attention or self.train_mlp):
            raise InvalidInput(
                "lora.train_vision needs train_attention or train_mlp, which it extends to the vision tower",
                field="lora.train_vision",
            )

    def adapts(self, target: LoraTarget) -> bool:
        """Whether a module is adapted."""
        if target.vision and not self.train_vision:
            return False
        return {
            Role.ATTENTION: self.train_attention,
            Role.MLP: self.train_mlp,
            Role.UNEMBEDDING: self.train_unembedding,
        }[target.role]

    def shapes(self, targets: Iterable[LoraTarget]) -> dict[str, tuple[int, ...]]:
        """Of all trained tensors, by name."""
        found: dict[str, tuple[int, ...]] = {}
        for target in targets:
            if self.adapts(target):
                found |= target.shapes(self.rank)
        return found


class LoraWeights:
    """The trained tensors of one adapter.

    Args:
        settings: What to adapt.
        targets: All modules that could be.
        device: Where the tensors live.
        dtype: The type of the model that it is computed with.

    A is uniform within 1/sqrt(in), as kaiming_uniform_(a=sqrt(5)), from the seed and the module's name alone, so that
    neither the number of ranks nor the other modules change it. B is zero.
    """

    def __init__(
        self, settings: LoraSettings, targets: Iterable[LoraTarget], device: torch.device, dtype: torch.dtype
    ) -> None:
        self.settings = settings
        adapted = [target for target in targets if settings.adapts(target)]
        shapes = settings.shapes(adapted)
        self.flat = torch.zeros(sum(map(math.prod, shapes.values())), device=device)
        self.flat_grad = torch.zeros_like(self.flat)
        self._cast = self.flat if dtype == self.flat.dtype else torch.zeros_like(self.flat, dtype=dtype)
        self._tensors: dict[str, Tensor] = {}
        views: dict[str, list[Tensor]] = {}
        for (name, shape), offset in zip(shapes.items(), _offsets(shapes.values()), strict=True):
            flats = (self.flat, self._cast, self.flat_grad)
            views[name] = [flat.narrow(0, offset, math.prod(shape)).view(shape) for flat in flats]
            leaf = self._tensors[name] = views[name][0]
            if name.endswith("lora_A"):
                leaf.copy_(_initial_a(name, shape, settings.seed))
            leaf.requires_grad_()
        self.experts: dict[str, ExpertAdapter] = {}
        self.pairs: dict[str, LoraPair] = {}
        for target in adapted:
            if target.is_experts:
                self.experts[target.name] = _of_experts(views, target, settings)
            else:
                self.pairs[target.name] = _pair(views, target.name, settings.scale)

    def cast(self) -> None:
        """Has the next passes compute with the weights as they are now."""
        if self._cast is not self.flat:
            self._cast.copy_(self.flat)

    def named(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The parts of a buffer laid out as this adapter, under PEFT's names, in order."""
        offset = 0
        for name, tensor in self._tensors.items():
            part = flat.narrow(0, offset, tensor.numel()).view(tensor.shape)
            yield f"{PEFT_PREFIX}{name}.weight", part
            offset += tensor.numel()


def _pair(views: Mapping[str, list[Tensor]], module: str, scale: float) -> LoraPair:
    (a, a_cast, a_grad), (b, b_cast, b_grad) = views[f"{module}.lora_A"], views[f"{module}.lora_B"]
    return LoraPair(a, b, a_cast, b_cast, a_grad, b_grad, scale)


def _of_experts(views: Mapping[str, list[Tensor]], target: LoraTarget, settings: LoraSettings) -> ExpertAdapter:
    names = target.shapes(settings.rank)
    return ExpertAdapter({name.removeprefix(f"{target.name}."): Factor(*views[name]) for name in names}, settings.scale)


def _offsets(shapes: Iterable[tuple[int, ...]]) -> Iterator[int]:
    offset = 0
    for shape in shapes:
        yield offset
        offset += math.prod(shape)


def _initial_a(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    word = sha256(f"{seed}/{name}".encode()).digest()[:8]
    generator = torch.Generator().manual_seed(int.from_bytes(word, "little", signed=True))
    bound = 1.0 / math.sqrt(shape[-1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


class LoraInjector:
    """Makes what is trained part of the linear modules and experts of the base model; placed once.

    Attributes:
        parameters: Names of the parameters of these modules, whose gradients the modules can add to masters.
    """

    def __init__(self, targets: Iterable[LoraTarget]) -> None:
        self._trained: dict[str, Trained | ExpertAdapter | ExpertMasters] = {}
        self._targets: list[LoraTarget] = []
        for target in targets:
            # The unembedding is no module call: logits are made in chunks, see target_logprobs.py.
            if target.role is not Role.UNEMBEDDING:
                self._targets.append(target)
                module: Any = target.module
                module.trained = partial(self._trained_of, target.name)
                if not target.is_experts:
                    module.forward = partial(_forward, module)
        self.parameters = [name for target in self._targets for name in target.parameters]

    def activate(self, weights: LoraWeights | None) -> None:
        """Makes an adapter take part in all forward passes from now on; None for the bare base."""
        self._trained = {**weights.pairs, **weights.experts} if weights else {}
        if weights is not None:
            weights.cast()

    def activate_full(self, masters: Mapping[str, Tensor]) -> None:
        """Sums the gradients of parameters, by name, into those of their float32 masters from now on."""
        self._trained = {}
        for target in self._targets if masters else ():
            own = [masters[name] for name in target.parameters]
            self._trained[target.name] = ExpertMasters(*own) if target.is_experts else own[0]

    def _trained_of(self, name: str) -> Trained | ExpertAdapter | ExpertMasters:
        return self._trained.get(name)


def _forward(module: nn.Linear, x: Tensor) -> Tensor:
    return shared_products(x, module)[0]
