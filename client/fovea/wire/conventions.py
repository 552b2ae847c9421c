"""Constants that all processes share: gRPC service names, checkpoint file names and size limits."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TypeVar

from google.protobuf.message import Message

ADMIN_SERVICE = "fovea.api.v1.AdminService"
GATEWAY_SERVICE = "fovea.api.v1.GatewayService"
LOG_SERVICE = "fovea.api.v1.LogService"
RENDERER_SERVICE = "fovea.api.v1.RendererService"
SAMPLER_SERVICE = "fovea.api.v1.SamplerService"
TRAINER_SERVICE = "fovea.api.v1.TrainerService"

SNAPSHOT_FILE = "fovea_snapshot.json"
"""File in a folder of weights: a `weights_pb2.Snapshot` as JSON, which says where the weights come from."""

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""The two files of an adapter in PEFT format."""

PEFT_READS_EXPERTS_OF = frozenset({"qwen3_moe", "qwen3_omni_moe"})
"""Model types for which PEFT 0.21 with transformers 5.19 loads adapters of single experts."""

EXPERTS_NOTE = (
    "This adapter contains factors of single experts, which vLLM and Fovea read. PEFT 0.21 ignores them without an "
    "error for this model. Merge the adapter into the model instead: `fovea export --merged`."
)
"""Note in `adapter_config.json` (key `fovea_note`) of an export that PEFT reads only in part."""

# Suffixes of temporary folders. A process that dies may leave such folders behind; the gateway removes them.

STAGING_SUFFIX = ".tmp-"
"""Suffix of a folder that is being written and will replace the folder without the suffix."""

REPLACED_SUFFIX = ".old-"
"""Suffix of a folder that has been replaced and will be removed."""

PLAIN_SUFFIX = ".plain"
"""Suffix of an export before encryption."""

# Settings may lower these limits but cannot exceed what gRPC enforces.

MESSAGE_BYTES = 4 * 2**20
"""gRPC's own limit for received messages. Larger objects are streamed in records or chunks."""

PIECE_BYTES = 2**20
"""Size of one chunk of a streamed object. Sizes between 256 KiB and 1 MiB were the fastest in measurements."""

INLINE_IMAGE_BYTES = 2**20
"""Encoded images up to this total size travel inside a request; larger ones are uploaded first and referenced."""

MAX_IMAGE_BYTES = 32 * 2**20
"""Largest size of an encoded image."""

MAX_IMAGE_PIXELS = 64 * 10**6
"""Largest number of pixels in an image. The size is read from the image header, before decoding."""

LEAST_TEMPERATURE, MOST_TEMPERATURE = 0.01, 2.0
"""Range of the temperature, for sampling above 0 and for losses.

vLLM silently raises smaller temperatures to 0.01 and rejects temperatures above 2.
"""

MAX_IMAGE_ASPECT_RATIO = 200
"""Largest ratio of an image's longer side to its shorter side; the Qwen-VL processors reject more."""

MAX_PICTURE_SIDE = "max_picture_side"
"""Key in a checkpoint's user metadata: longer side in pixels, as a decimal number, of the images used in training.

Larger images are shrunk to it before sampling. 0 leaves every image at its size.
"""

QUESTION, SYSTEM_PROMPT = "fovea_question", "fovea_system_prompt"
"""Keys in a checkpoint's user metadata: the texts that asked about each image in training, if all rows had the same."""

_SIDE_DIGITS = 9

M = TypeVar("M", bound=Message)


def group_by_size(messages: Iterable[M]) -> Iterator[list[M]]:
    """Yields the messages in order, in lists of at most PIECE_BYTES; a larger message is a list of its own."""
    group: list[M] = []
    group_bytes = 0
    for message in messages:
        size_bytes = message.ByteSize()
        if group and group_bytes + size_bytes > PIECE_BYTES:
            yield group
            group, group_bytes = [], 0
        group.append(message)
        group_bytes += size_bytes
    if group:
        yield group


def picture_side(metadata: Mapping[str, str]) -> int | None:
    """Returns the value of MAX_PICTURE_SIDE in a checkpoint's user metadata, in pixels; None if it has no valid one."""
    said = metadata.get(MAX_PICTURE_SIDE, "")
    return int(said) if said.isdecimal() and len(said) <= _SIDE_DIGITS else None


_MARKUP = (re.compile(r"<[^<>]+>"), re.compile(r"\[[^\[\]]+\]"))
_HTML = re.compile(r"</?(?:table|caption|thead|tbody|tfoot|tr|th|td|h[1-6]|blockquote|strong|em|[bisu]|sub|sup|code)>")
"""Elements that Gemma's tokenizers have as added tokens."""


def is_token(api_key: str) -> bool:
    """Returns whether a credential is a token of a sign-in (a JWT), as the SDK tells tokens from API keys."""
    return api_key.startswith("eyJ")


def is_markup(token: str) -> bool:
    """Returns whether an added token marks up prompts: `<think>`, `<|fim_prefix|>` and `[INST]` do, HTML does not."""
    return any(pattern.fullmatch(token) for pattern in _MARKUP) and _HTML.fullmatch(token) is None


def replace_markup(text: str, tokens: Collection[str], replace: Callable[[str], str]) -> str:
    """Returns a text with the markup among `tokens` replaced.

    Time is linear in the text however many tokens there are: Gemma has 6,000 of them.
    """
    for pattern in _MARKUP:
        text = pattern.sub(lambda found: replace(found[0]) if found[0] in tokens else found[0], text)
    return text
