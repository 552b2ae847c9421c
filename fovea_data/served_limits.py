"""Limits of a served model, which the SDK does not pass on, and the picture size that a checkpoint was trained with.

Asking for the limits also shows at once whether a server answers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import tinker

from fovea.wire import conventions
from fovea.wire.errors import FailedPrecondition, InvalidInput
from fovea_rollout.messages import Picture

_PATH = "api/v1/get_server_capabilities"
_TIMEOUT = httpx.Timeout(60.0, connect=10.0)


@dataclass(frozen=True)
class ServedLimits:
    """Limits and files of one served model. None stands for what the server does not report.

    Attributes:
        tokenizer_id: Directory or hub name of the tokenizer, beside which the model's configuration is.
        max_lora_rank: The largest rank of an adapter.
        max_image_bytes: Bytes of the file of one picture.
        max_image_pixels: Width times height of one picture.
        max_image_aspect_ratio: The longer side of a picture over the shorter one.
        max_body_bytes: Bytes of a request, before compression: a row is sent whole.
    """

    tokenizer_id: str | None = None
    max_lora_rank: int | None = None
    max_image_bytes: int | None = None
    max_image_pixels: int | None = None
    max_image_aspect_ratio: int | None = None
    max_body_bytes: int | None = None

    def check_rank(self, rank: int) -> None:
        """Raises InvalidInput if an adapter of this rank is refused."""
        if self.max_lora_rank and rank > self.max_lora_rank:
            raise InvalidInput(
                f"rank is {rank}, and this server takes {self.max_lora_rank} at most: lower it, or start the trainer"
                " with a larger max_lora_rank",
                field="rank",
            )

    def check_pictures(self, pictures: Sequence[Picture]) -> None:
        """Raises InvalidInput if a picture of a row is refused, or if all together are too many bytes."""
        for picture in pictures:
            self._check_picture(picture)
        size_bytes = sum(-(-len(picture.data) // 3) * 4 for picture in pictures)  # as base64
        if self.max_body_bytes is not None and size_bytes > self.max_body_bytes:
            raise InvalidInput(
                f"its {len(pictures)} pictures have {size_bytes} bytes as base64, and {self.max_body_bytes} is this"
                " server's most of a request: shrink them (max_side)"
            )

    def _check_picture(self, picture: Picture) -> None:
        width, height = picture.size
        ratio = max(width, height) / min(width, height)
        for what, seen, most in (
            ("its number of bytes", len(picture.data), self.max_image_bytes),
            ("its number of pixels", width * height, self.max_image_pixels),
            ("its longer side over its shorter one", ratio, self.max_image_aspect_ratio),
        ):
            if most is not None and seen > most:
                raise InvalidInput(
                    f"a picture of {width}x{height} pixels is refused by this server: {what} is {seen:.12g}, and"
                    f" {most} is the most: shrink it (max_side), or cut it"
                )


def ask_limits(base_url: str | None, api_key: str | None) -> Mapping[str, ServedLimits]:
    """Limits by the model's name; empty where a server tells none, and for the SDK's own default server.

    Args:
        base_url: Of the server; None reads TINKER_BASE_URL.
        api_key: None reads TINKER_API_KEY.

    Raises:
        FailedPrecondition: No server answers.
    """
    url, key = base_url or os.environ.get("TINKER_BASE_URL"), api_key or os.environ.get("TINKER_API_KEY")
    if not url:
        return {}
    try:
        answer = httpx.get(f"{url.rstrip('/')}/{_PATH}", headers={"X-API-Key": key or ""}, timeout=_TIMEOUT)
    except (httpx.TransportError, httpx.InvalidURL, OSError) as error:
        raise FailedPrecondition(
            f"no server answers at {url} ({error or type(error).__name__}): start one with `fovea up`, or give the"
            " address of one that runs (base_url, --base-url or TINKER_BASE_URL)",
            field="base_url",
        ) from None
    if answer.status_code != 200:
        return {}  # the SDK says better why
    models: list[dict[str, Any]] = answer.json().get("supported_models", [])
    names = ServedLimits.__dataclass_fields__
    return {str(one.get("model_name")): ServedLimits(**{name: one.get(name) for name in names}) for one in models}


def picture_side(rest: tinker.RestClient, path: str, default: int | None) -> int | None:
    """Pixels that the longer side of a picture may have that a checkpoint is asked about; None keeps every size.

    Args:
        path: `tinker://...`.
        default: For a checkpoint that does not say, and for another owner's, whose list cannot be read.

    Raises:
        InvalidInput: The path is none.
        tinker.TinkerError: What else the server refuses.
    """
    try:
        run = tinker.ParsedCheckpointTinkerPath.from_tinker_path(path).training_run_id
    except ValueError as error:
        raise InvalidInput(f"{path!r} is no checkpoint: {error}", field="path") from None
    try:
        listed = rest.list_checkpoints(run).result().checkpoints
    except (tinker.NotFoundError, tinker.PermissionDeniedError):
        return default
    side = conventions.picture_side(next((one.user_metadata or {} for one in listed if one.tinker_path == path), {}))
    return default if side is None else side or None
