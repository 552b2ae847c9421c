"""Dense language models without a vision tower, whatever their architecture."""

from collections.abc import Sequence
from typing import Any

from services.sampler.families.base import Family, FeatureTensors

_TOWERS = ("vision_config", "audio_config", "image_token_id")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


class TextFamily(Family):
    """No image has a place in the prompt."""

    @classmethod
    def describes(cls, config: dict[str, Any]) -> bool:
        """Any model whose configuration names no vision tower and no experts, for which there are no adapters."""
        return not any(name in config for name in (*_TOWERS, *_EXPERTS))

    @property
    def image_token_id(self) -> None:
        """There is none."""
        return None

    @property
    def reserved_token_ids(self) -> frozenset[int]:
        """All ids are text."""
        return frozenset()

    @property
    def image_opener_id(self) -> None:
        """There is none."""
        return None

    def grid_problem(self, grid: Sequence[int]) -> str:
        """No grid is right."""
        return "the model takes no images"

    def token_count(self, grid: Sequence[int]) -> int:
        """No image takes tokens."""
        return 0

    def tensor_shapes(self, grid: Sequence[int]) -> dict[str, tuple[str, tuple[int, ...]]]:
        """No tensors."""
        return {}

    def grey_image(self) -> tuple[FeatureTensors, list[int]] | None:
        """No image."""
        return None

    def values_problem(self, grid: Sequence[int], tensors: FeatureTensors) -> str:
        """Nothing to check."""
        return ""


FAMILY = TextFamily
