"""Limits of a served model, which the SDK does not pass on, and the metadata of a checkpoint.

Requesting the limits also finds out at once whether a server responds.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx

from fovea.wire import conventions
from fovea.wire.errors import FailedPrecondition, InvalidInput
from fovea_rollout.connection import checked_key
from fovea_rollout.messages import Picture

if TYPE_CHECKING:
    import tinker

_TIMEOUT = httpx.Timeout(60.0, connect=10.0)


@dataclass(frozen=True)
class ServedLimits:
    """Limits and files of one served model. A value is None if the server does not report it.

    Attributes:
        tokenizer_id: Directory or hub name of the tokenizer, which also contains the model's configuration.
        max_lora_rank: The largest rank of an adapter.
        max_image_bytes: The most bytes of the file of one picture.
        max_image_pixels: The most pixels of one picture, width times height.
        max_image_aspect_ratio: The largest ratio of a picture's longer side to its shorter one.
        max_body_bytes: The most bytes of a request before compression. A row is sent in one request.
    """

    tokenizer_id: str | None = None
    max_lora_rank: int | None = None
    max_image_bytes: int | None = None
    max_image_pixels: int | None = None
    max_image_aspect_ratio: int | None = None
    max_body_bytes: int | None = None

    def check_rank(self, rank: int) -> None:
        """Raises InvalidInput if the server would refuse an adapter of this rank."""
        if self.max_lora_rank and rank > self.max_lora_rank:
            raise InvalidInput(
                f"rank is {rank}, but this server accepts {self.max_lora_rank} at most: lower it, or start the trainer"
                " with a larger max_lora_rank",
                field="rank",
            )

    def check_pictures(self, pictures: Sequence[Picture]) -> None:
        """Raises InvalidInput if the server would refuse a picture of a row, or the bytes of all together."""
        for picture in pictures:
            self._check_picture(picture)
        size_bytes = sum(-(-len(picture.data) // 3) * 4 for picture in pictures)  # as base64
        if self.max_body_bytes is not None and size_bytes > self.max_body_bytes:
            raise InvalidInput(
                f"its {len(pictures)} pictures have {size_bytes} bytes as base64, but a request to this server may have"
                f" {self.max_body_bytes}: shrink them (max_side)"
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
                    f"this server refuses a picture of {width}x{height} pixels: {what} is {seen:.12g}, but {most} is"
                    " the limit: shrink it (max_side), or crop it"
                )


def ask_limits(base_url: str | None, api_key: str | None, progress: bool | None = None) -> Mapping[str, ServedLimits]:
    """Requests the limits of a server's models.

    The result maps names of models to limits. It is empty if the server reports none, and for the SDK's default server.

    Args:
        base_url: Address of the server; None reads TINKER_BASE_URL.
        api_key: API key; None takes what the SDK would: TINKER_API_KEY, TINKER_CREDENTIAL_CMD or the stored login.
        progress: False prints no line on standard error before the SDK is loaded.

    Raises:
        NotConnected: No server responds, or it refuses the API key.
    """
    url = base_url or os.environ.get("TINKER_BASE_URL")
    if not url:
        return {}
    key = checked_key(url, api_key, progress)
    if key is None:
        command = os.environ["TINKER_CREDENTIAL_CMD"]
        key = subprocess.run(command, shell=True, capture_output=True, text=True).stdout.strip()  # as the SDK does
    try:
        with httpx.Client(base_url=f"{url.rstrip('/')}/api/v1/", timeout=_TIMEOUT) as http:
            if conventions.is_token(key):
                token = http.post("auth/token", headers={"X-API-Key": key}, json={})
                key = str(token.json()["jwt"]) if token.status_code == 200 else key
            answer = http.get("get_server_capabilities", headers={"X-API-Key": key})
    except httpx.TransportError as error:
        raise FailedPrecondition(
            f"the server at {url} no longer responds ({error or type(error).__name__}): see its log", field="base_url"
        ) from None
    if answer.status_code != 200:
        return {}  # the SDK reports this error better
    models: list[dict[str, Any]] = answer.json().get("supported_models", [])
    names = ServedLimits.__dataclass_fields__
    return {str(one.get("model_name")): ServedLimits(**{name: one.get(name) for name in names}) for one in models}


def picture_side(metadata: Mapping[str, str], default: int | None) -> int | None:
    """Returns the most pixels of a picture's longer side, as a checkpoint's user metadata records; None is no limit.

    Without a recorded limit it returns the default.
    """
    side = conventions.picture_side(metadata)
    return default if side is None else side or None


def checkpoint_metadata(rest: tinker.RestClient, path: str) -> Mapping[str, str]:
    """Returns a checkpoint's user metadata; empty for one that `find_checkpoint` does not find. Raises its errors."""
    found = find_checkpoint(rest, path)
    return (found.user_metadata if found else None) or {}


def find_checkpoint(rest: tinker.RestClient, path: str) -> tinker.types.Checkpoint | None:
    """Returns a checkpoint; None if the client's owner has none with this path.

    Args:
        rest: Client of the server.
        path: Path of the checkpoint, `tinker://...`.

    Raises:
        InvalidInput: The path is malformed.
        tinker.TinkerError: The server refuses another request.
    """
    import tinker  # late, because it takes seconds and a wrong address should be reported at once

    try:
        run = tinker.ParsedCheckpointTinkerPath.from_tinker_path(path).training_run_id
    except ValueError as error:
        raise InvalidInput(f"{path!r} is not a checkpoint path: {error}", field="path") from None
    try:
        listed = rest.list_checkpoints(run).result().checkpoints
    except (tinker.NotFoundError, tinker.PermissionDeniedError):
        return None
    return next((one for one in listed if one.tinker_path == path), None)
