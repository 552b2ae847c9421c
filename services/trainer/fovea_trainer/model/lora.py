"""LoRA adapters: small float32 tensors beside the sharded base, injected by hooks. Many adapters share one base.

All tensors of an adapter are views of one flat buffer, and their gradients are views of another. An adapter therefore
needs one all-reduce, one optimizer parameter, and one copy per snapshot. Every rank holds the same values, except for
the factors of experts that are distributed over ranks.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, partial
from hashlib import sha256
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fovea.api.v1 import weights_pb2
from fovea.wire.errors import InvalidInput
from fovea_trainer.model.expert_routing import EXPERTS, gather_from_experts
from fovea_trainer.model.experts import ExpertAdapter, ExpertMasters, Factor
from fovea_trainer.model.lora_linear import UNEMBEDDING, LoraPair, StackedPair, Trained, shared_products
from fovea_trainer.model.model_family import LoraTarget, Role
from fovea_trainer.model.optimizer import LARGEST_WEIGHT

PEFT_PREFIX = "base_model.model."
DEFAULT_ALPHA = 32.0
_LARGEST_SCALE = 1024.0
"""The largest alpha / rank. At this scale factors may still be as large as 64."""
_T = TypeVar("_T")


def by_own_names(tensors: Mapping[str, _T], own: Iterable[str]) -> dict[str, _T]:
    """Returns tensors of an adapter by a model's own names, `own`, where hosted Tinker has other names for them.

    It leaves out `language_model.` in vision models, and calls the unembedding `model.unembed_tokens`. Raises
    InvalidInput for a tensor under both names.
    """
    known, found = {_hosted(name): name for name in own}, dict[str, _T]()
    for given, tensor in tensors.items():
        name = known.get(_hosted(given), given)
        if name in found:
            raise InvalidInput(f"the adapter has {name!r} under two names, one of them {given!r}: keep one of both")
        found[name] = tensor
    return found


def _hosted(name: str) -> str:
    return name.replace(".language_model.", ".").replace(f".{UNEMBEDDING}.", ".model.unembed_tokens.")


@dataclass(frozen=True)
class LoraSettings:
    """The settings of an adapter, as `LoraConfig` on the wire."""

    rank: int
    alpha: float
    seed: int
    train_attention: bool
    train_mlp: bool
    train_unembedding: bool
    train_vision: bool

    @classmethod
    def of(cls, given: weights_pb2.LoraConfig) -> Self:
        """Reads the settings from a message. An alpha of 0 means the default."""
        settings = cls(**{field.name: getattr(given, field.name) for field in fields(cls)})
        return settings if settings.alpha else replace(settings, alpha=DEFAULT_ALPHA)

    def message(self) -> weights_pb2.LoraConfig:
        """Returns the settings as a message."""
        return weights_pb2.LoraConfig(**asdict(self))

    @property
    def scale(self) -> float:
        """alpha / rank, the factor of B (A x)."""
        return self.alpha / self.rank

    @property
    def largest(self) -> float:
        """The largest allowed magnitude of a factor. B times the scale must also stay within the limit of a weight."""
        return LARGEST_WEIGHT / max(1.0, self.scale)

    def check(self, max_rank: int, adapts_vision: bool) -> None:
        """Checks that the trainer can honour the settings.

        Args:
            max_rank: Highest supported rank; 0 if the model supports no adapters.
            adapts_vision: True if the model has a vision tower that adapters can reach.

        Raises:
            InvalidInput: A setting is not supported.
        """
        if not max_rank:
            raise InvalidInput(
                "lora is set, but vLLM does not support LoRA for this model; train full parameters instead",
                field="lora",
            )
        if not 1 <= self.rank <= max_rank:
            raise InvalidInput(f"lora.rank {self.rank} is not in 1 .. {max_rank}", field="lora.rank")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise InvalidInput(f"lora.alpha {self.alpha} must be positive and finite", field="lora.alpha")
        if self.scale > _LARGEST_SCALE:
            raise InvalidInput(
                f"lora.alpha {self.alpha:g} is {self.scale:g} times the rank; the limit is {_LARGEST_SCALE:g} times",
                field="lora.alpha",
            )
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
        """Returns True if these settings adapt the module."""
        if target.vision and not self.train_vision:
            return False
        return {
            Role.ATTENTION: self.train_attention,
            Role.MLP: self.train_mlp,
            Role.UNEMBEDDING: self.train_unembedding,
        }[target.role]

    def shapes(self, targets: Iterable[LoraTarget], spread: int = 1) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of all trained tensors, keyed by tensor name, on one rank.

        Args:
            targets: All modules that can be adapted.
            spread: Number of ranks over which experts are distributed.
        """
        found: dict[str, tuple[int, ...]] = {}
        for target in targets:
            if self.adapts(target):
                found |= target.shapes(self.rank)
        return {name: (shape[0] // spread, *shape[1:]) if _is_spread(shape) else shape for name, shape in found.items()}


class LoraWeights:
    """The trained tensors of one adapter.

    A is uniform within +-1/sqrt(in), as kaiming_uniform_(a=sqrt(5)). It depends on the seed and the tensor's name, but
    not on the number of ranks or on other modules. B is zero.

    Args:
        settings: The adapter's settings.
        targets: All modules that can be adapted.
        device: Device of the tensors.
        dtype: Dtype of the model, in which the adapter is applied.
        mesh: Mesh over which experts are distributed, or None. The flat buffers then end with the factors of this
            rank's experts.
    """

    def __init__(
        self,
        settings: LoraSettings,
        targets: Iterable[LoraTarget],
        device: torch.device,
        dtype: torch.dtype,
        mesh: DeviceMesh | None = None,
    ) -> None:
        self.settings = settings
        self._mesh = mesh
        adapted = [target for target in targets if settings.adapts(target)]
        self._whole_shapes = settings.shapes(adapted)
        spread, place = (mesh[EXPERTS].size(), mesh.get_local_rank(EXPERTS)) if mesh else (1, 0)
        shapes = settings.shapes(adapted, spread)
        if spread > 1:
            shapes = dict(sorted(shapes.items(), key=lambda item: _is_spread(self._whole_shapes[item[0]])))
        own = sum(math.prod(shape) for name, shape in shapes.items() if shape != self._whole_shapes[name])
        self._shared_size = sum(map(math.prod, shapes.values())) - own
        self.flat = torch.zeros(sum(map(math.prod, shapes.values())), device=device)
        self.flat_grad = torch.zeros_like(self.flat)
        self._cast = self.flat if dtype == self.flat.dtype else torch.zeros_like(self.flat, dtype=dtype)
        self._tensors: dict[str, Tensor] = {}
        views = _views(shapes, self.flat, self._cast, self.flat_grad)
        for name, shape in shapes.items():
            leaf = self._tensors[name] = views[name][0]
            if name.endswith("lora_A"):
                first = place * shape[0] if shape != self._whole_shapes[name] else 0
                leaf.copy_(_initial_a(name, self._whole_shapes[name], settings.seed)[first : first + shape[0]])
            leaf.requires_grad_()
        self.experts: dict[str, ExpertAdapter] = {}
        self.pairs: dict[str, LoraPair] = {}
        for target in adapted:
            if target.is_experts:
                self.experts[target.name] = _of_experts(views, target, settings)
            else:
                self.pairs[target.name] = _pair(views, target.name, settings.scale)

    @property
    def cast_weights(self) -> Tensor:
        """The flat buffer of the weights in the model's dtype, as of the last `cast`."""
        return self._cast

    @cached_property
    def layout(self) -> "AdapterLayout":
        """The tensors of the adapter and their places, without the tensors. The adapter must not adapt experts."""
        return AdapterLayout(tuple(self._whole_shapes.items()), tuple(self.pairs), self.settings.scale)

    def cast(self) -> None:
        """Updates the copy in the model's dtype, so that the next passes use the current weights."""
        if self._cast is not self.flat:
            self._cast.copy_(self.flat)

    @property
    def whole_size(self) -> int:
        """Number of parameters of the adapter, including the factors of other ranks' experts."""
        return sum(map(math.prod, self._whole_shapes.values()))

    def named(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yields the PEFT name and a view of each tensor in a whole buffer, in order; see `whole`."""
        for name, (part,) in _views(self._whole_shapes, flat).items():
            yield f"{PEFT_PREFIX}{name}.weight", part

    def initial(self) -> Tensor:
        """Returns a new buffer of the whole adapter at its initialization. Its B is zero, so it has no effect."""
        found = self.flat.new_zeros(self.whole_size)
        for (name, shape), (_, part) in zip(self._whole_shapes.items(), self.named(found), strict=True):
            if name.endswith("lora_A"):
                part.copy_(_initial_a(name, shape, self.settings.seed))
        return found

    def whole(self, flat: Tensor) -> Tensor:
        """Returns the buffer of the whole adapter, assembled from the ranks' buffers laid out as `flat`. Collective.

        Without distributed experts it returns `flat` itself.
        """
        if self._mesh is None:
            return flat
        found = flat.new_empty(self.whole_size)
        own = [dict(self._own(part)) for part in gather_from_experts(flat, self._mesh)]
        for name, target in self.named(found):
            parts = [part[name] for part in own]
            target.copy_(parts[0] if parts[0].shape == target.shape else torch.cat(parts))
        return found

    def part(self, whole: Tensor) -> Tensor:
        """Returns this rank's part of a whole buffer: the inverse of `whole`. Not collective."""
        if self._mesh is None:
            return whole
        found, wholes = torch.empty_like(self.flat), dict(self.named(whole))
        for name, target in self._own(found):
            rows = wholes[name].chunk(len(wholes[name]) // len(target))
            target.copy_(rows[self._mesh.get_local_rank(EXPERTS)] if len(rows) > 1 else rows[0])
        return found

    def sum_over_ranks(self, flat: Tensor) -> Tensor:
        """Sums a buffer laid out as `flat` over the ranks, in place. Collective.

        Returns:
            The squared norm of the whole, a float32 scalar.
        """
        # Shared tensors are summed over all ranks. Ranks along EXPERTS hold factors of different experts, so these are
        # summed over the other dimensions only. Their squared norms are then summed over EXPERTS.
        shared, own = flat.tensor_split([self._shared_size])
        dist.all_reduce(shared)
        squares: Tensor = torch.linalg.vector_norm(shared).square()
        if self._mesh is None:
            return squares
        for name in self._mesh.mesh_dim_names or ():
            if name != EXPERTS:
                dist.all_reduce(own, group=self._mesh.get_group(name))
        own_squares: Tensor = torch.linalg.vector_norm(own).square()
        dist.all_reduce(own_squares, group=self._mesh.get_group(EXPERTS))
        return squares + own_squares

    def _own(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}
        for name, (part,) in _views(shapes, flat).items():
            yield f"{PEFT_PREFIX}{name}.weight", part


@dataclass(frozen=True)
class AdapterLayout:
    """The layout of flat buffers. It is equal for adapters with the same tensors at the same places and the same scale.

    Args:
        shapes: Name and shape of each tensor, in order.
        modules: Names of the adapted modules.
        scale: alpha / rank.
    """

    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    modules: tuple[str, ...]
    scale: float

    def pairs_on(self, cast: Tensor, grad: Tensor, rows: int | None = None) -> dict[str, LoraPair]:
        """Returns pairs over buffers with this layout.

        Args:
            cast: Weights in the model's dtype, used in products. They also replace the float32 weights, which a pass
                needs only as leaves of its graph. [size of an adapter], or [adapters, size] with `rows`.
            grad: float32, to which backward passes add.
            rows: Number of rows of each adapter, for pairs of stacked adapters.
        """
        views = _views(dict(self.shapes), cast, cast, grad)
        for leaf, *_ in views.values():
            leaf.requires_grad_()
        pairs = {module: _pair(views, module, self.scale) for module in self.modules}
        if rows is None:
            return pairs
        return {module: StackedPair(**vars(pair), rows=rows) for module, pair in pairs.items()}


def _is_spread(shape: tuple[int, ...]) -> bool:
    """Returns True for a factor with one matrix per expert."""
    return len(shape) == 3 and shape[0] > 1


def _pair(views: Mapping[str, list[Tensor]], module: str, scale: float) -> LoraPair:
    (a, a_cast, a_grad), (b, b_cast, b_grad) = views[f"{module}.lora_A"], views[f"{module}.lora_B"]
    return LoraPair(a, b, a_cast, b_cast, a_grad, b_grad, scale)


def _of_experts(views: Mapping[str, list[Tensor]], target: LoraTarget, settings: LoraSettings) -> ExpertAdapter:
    names = target.shapes(settings.rank)
    return ExpertAdapter({name.removeprefix(f"{target.name}."): Factor(*views[name]) for name in names}, settings.scale)


def _views(shapes: Mapping[str, tuple[int, ...]], *flats: Tensor) -> dict[str, list[Tensor]]:
    """Returns a view of each tensor in each flat buffer. Tensors follow one another in a buffer's last dimension."""
    views, offset = {}, 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        views[name] = [flat.narrow(-1, offset, size).view(*flat.shape[:-1], *shape) for flat in flats]
        offset += size
    return views


def _initial_a(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    word = sha256(f"{seed}/{name}".encode()).digest()[:8]
    generator = torch.Generator().manual_seed(int.from_bytes(word, "little", signed=True))
    bound = 1.0 / math.sqrt(shape[-1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


class LoraInjector:
    """Makes the linear modules and experts of the base model apply trained tensors. Created once per base.

    Attributes:
        parameters: Names of these modules' parameters. The modules can add the gradients of these parameters directly
            to float32 masters.
    """

    def __init__(self, targets: Iterable[LoraTarget]) -> None:
        self._trained: dict[str, Trained | ExpertAdapter | ExpertMasters] = {}
        self._targets: list[LoraTarget] = []
        for target in targets:
            # The unembedding is never called as a module, because target_logprobs.py computes logits in chunks.
            if target.role is not Role.UNEMBEDDING:
                self._targets.append(target)
                module: Any = target.module
                module.trained = partial(self._trained_of, target.name)
                if not target.is_experts:
                    module.forward = partial(_forward, module)
        self.parameters = [name for target in self._targets for name in target.parameters]

    def activate(self, weights: LoraWeights | None) -> None:
        """Applies an adapter in all following forward passes; None means the bare base."""
        self._trained = {**weights.pairs, **weights.experts} if weights else {}
        if weights is not None:
            weights.cast()

    @contextmanager
    def holding(self, pairs: Mapping[str, LoraPair]) -> Iterator[None]:
        """Makes forward passes within a block use these pairs and no other trained tensors."""
        before, self._trained = self._trained, dict(pairs)
        try:
            yield
        finally:
            self._trained = before

    def activate_full(self, masters: Mapping[str, Tensor]) -> None:
        """Makes all following passes add gradients to the `grad` of these float32 masters, keyed by parameter name."""
        self._trained = {}
        for target in self._targets if masters else ():
            own = [masters[name] for name in target.parameters]
            self._trained[target.name] = ExpertMasters(*own) if target.is_experts else own[0]

    def _trained_of(self, name: str) -> Trained | ExpertAdapter | ExpertMasters:
        return self._trained.get(name)


def _forward(module: nn.Linear, x: Tensor) -> Tensor:
    return shared_products(x, module)[0]
