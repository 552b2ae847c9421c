"""Counts the floating-point operations of a training step.

FLOPs per token, by weights used (Kaplan et al. 2020): forward 2 N; backward 2 N for activations and, for trained
weights, 2 N more. This gives 6 N for all parameters and 4 N with adapters. N is the language model without its
embedding table but with the unembedding; for a mixture of experts, the part active per token: routers, shared
components and k of each layer's experts.

Published figures omit the FLOPs of the adapters. If a rank r is given, they are added: 6 r W, with W the inputs and
outputs of all adapted layers. For experts with three matrices between D and I channels this is 3 (D + k I), because one
factor of each pair, on the side of the D channels, is shared and computed once per token.

Attention adds, per layer, 4 H S^2 / 2 (causal) forward and twice that backward for a sequence of S. A frozen vision
tower adds 2 N_v per patch, a trained one 6 N_v, with its own non-causal attention 4 H S^2 over the S patches of an
image.
"""

from dataclasses import dataclass

IMAGE_SIDE = 448
PATCHES = (IMAGE_SIDE // 16) ** 2
H200_BF16_FLOPS = 989e12
"""Peak of dense operations, as stated by the manufacturer."""

_VOCABULARY = 151936


@dataclass(frozen=True)
class FamilySize:
    """Sizes that determine a model's FLOPs; tools/benchmarks/family_shapes.py counts them on a model of any family.

    Attributes:
        language_parameters: Parameters of the layers' matrices and the unembedding.
        attention: Channels of all query heads, and the window if any, of each layer with attention. Layers with linear
            attention add nothing here: their state costs less than a hundredth of their matrices.
        vision_parameters: Parameters of the tower's matrices.
        patches: Patches that the tower sees at once.
        adapter_width: Numbers of a rank-1 adapter used per token.
    """

    language_parameters: float
    attention: tuple[tuple[int, int | None], ...]
    vision_parameters: float
    vision_layers: int
    vision_hidden: int
    patches: int
    adapter_width: float = 0

    def flops(self, lengths: list[int], image_count: int, trains_all: bool, rank: int = 0) -> float:
        """Returns the FLOPs of one forward_backward on datums of these lengths; includes the adapter's for a rank above
        0.
        """
        matrices = (6 if trains_all else 4) * self.language_parameters * sum(lengths)
        matrices += 6 * rank * self.adapter_width * sum(lengths)
        seen = {window: sum(_pairs(length, window) for length in lengths) for _, window in self.attention}
        attention = sum(3 * 4 * channels * seen[window] for channels, window in self.attention)
        passes = 3 if trains_all else 1
        tower = passes * image_count * 2 * self.vision_parameters * self.patches
        tower += passes * image_count * 4 * self.vision_layers * self.vision_hidden * self.patches**2
        return matrices + attention + tower


def _pairs(length: int, window: int | None) -> float:
    """Returns the number of pairs of a token and a token that it sees: half of all, or those within a window."""
    if window is None or window >= length:
        return length**2 / 2
    return window**2 / 2 + (length - window) * window


@dataclass(frozen=True)
class Size:
    """Sizes that determine the FLOPs of a shape; see tools/benchmarks/shapes.py."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    vision_hidden: int
    vision_intermediate: int
    vision_layers: int

    @property
    def language_parameters(self) -> float:
        """Parameters without the embedding table but with the unembedding."""
        attention = self.hidden * 128 * (2 * self.heads + 2 * 8)
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + self.hidden * _VOCABULARY

    @property
    def vision_parameters(self) -> float:
        """Parameters of the tower's blocks."""
        return self.vision_layers * (4 * self.vision_hidden**2 + 2 * self.vision_hidden * self.vision_intermediate)

    def flops(self, lengths: list[int], image_count: int, trains_all: bool) -> float:
        """Returns the FLOPs of one forward_backward on datums of these lengths."""
        attention = self.layers * ((self.heads * 128, None),)
        tower = (self.vision_parameters, self.vision_layers, self.vision_hidden, PATCHES)
        return FamilySize(self.language_parameters, attention, *tower).flops(lengths, image_count, trains_all)


SIZES = {
    "2b": Size(2048, 6144, 28, 16, 1024, 4096, 24),
    "4b": Size(2560, 9728, 36, 32, 1024, 4096, 24),
    "8b": Size(4096, 12288, 36, 32, 1152, 4304, 27),
}
