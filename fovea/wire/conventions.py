"""What every process must take alike: names of gRPC services and of checkpoint files, and bounds of what travels."""

from collections.abc import Mapping

ADMIN_SERVICE = "fovea.api.v1.AdminService"
GATEWAY_SERVICE = "fovea.api.v1.GatewayService"
RENDERER_SERVICE = "fovea.api.v1.RendererService"
SAMPLER_SERVICE = "fovea.api.v1.SamplerService"
TRAINER_SERVICE = "fovea.api.v1.TrainerService"

SNAPSHOT_FILE = "fovea_snapshot.json"
"""In a folder of weights: whose they are, a `weights_pb2.Snapshot` as JSON."""

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""The two files of an adapter, as PEFT names them."""

PEFT_READS_EXPERTS_OF = frozenset({"qwen3_moe"})
"""Model types whose experts PEFT 0.21 on transformers 5.19 adapts from an adapter for each expert."""

EXPERTS_NOTE = (
    "The adapter has factors of single experts, which vLLM and Fovea read. PEFT 0.21 leaves them out without an error "
    "for this model: merge it with `fovea export --merged` instead."
)
"""In `adapter_config.json` of an export that PEFT does not read as a whole, as `fovea_note`."""

# A process that dies may leave folders behind which have one of these after their name; the gateway removes them.

STAGING_SUFFIX = ".tmp-"
"""A folder that is being written, and will take the place of the one it is named for."""

REPLACED_SUFFIX = ".old-"
"""A folder that has lost its place, and is to be removed."""

PLAIN_SUFFIX = ".plain"
"""An export before it is encrypted."""

# Settings may lower these bounds, never raise what gRPC itself enforces.

MESSAGE_BYTES = 4 * 2**20
"""gRPC's own receive limit. Larger things are streamed as records or pieces."""

PIECE_BYTES = 2**20
"""Size of one piece of a streamed object; measured fastest between 256 KiB and 1 MiB."""

INLINE_IMAGE_BYTES = 2**20
"""Encoded images up to this size, in all, ride inside a request; larger ones are put first and referred to."""

MAX_IMAGE_BYTES = 32 * 2**20
"""The largest encoded image."""

MAX_IMAGE_PIXELS = 64 * 10**6
"""The most pixels an image may declare; read from its header, before anything is decoded."""

LEAST_TEMPERATURE, MOST_TEMPERATURE = 0.01, 2.0
"""Of sampling above 0, and of a loss. vLLM silently raises a smaller one to 0.01, and refuses one above 2."""

MAX_IMAGE_ASPECT_RATIO = 200
"""The largest ratio of the longer to the shorter side; the Qwen-VL processors refuse more."""

MAX_PICTURE_SIDE = "max_picture_side"
"""In a checkpoint's user metadata: pixels of the longer side of the pictures that it was trained on, in decimal; larger
pictures are shrunk before they are asked. 0 keeps every size."""

_SIDE_DIGITS = 9


def picture_side(metadata: Mapping[str, str]) -> int | None:
    """Returns what a checkpoint's user metadata has as MAX_PICTURE_SIDE, in pixels; None if it has no such number."""
    said = metadata.get(MAX_PICTURE_SIDE, "")
    return int(said) if said.isdecimal() and len(said) <= _SIDE_DIGITS else None
