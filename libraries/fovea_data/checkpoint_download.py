"""Downloads the weights of a `tinker://` checkpoint: an adapter in PEFT's format, or a whole checkpoint."""

from __future__ import annotations

import contextlib
import os
import pathlib
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from urllib.parse import quote

import httpx

from fovea.wire.errors import FailedPrecondition, Internal, InvalidInput, NotFound, Unavailable
from fovea_rollout.late_sdk import tinker

_EXPORT_TTL_S = 3600
_TIMEOUT_S = 60.0


def download_checkpoint(
    path: str,
    folder: pathlib.Path,
    *,
    base_url: str | None = None,
    api_key: str | None = None,
    on_bytes: Callable[[int, int], None] = lambda _done, _of: None,
) -> None:
    """Downloads the files of a checkpoint.

    A training checkpoint is loaded into a temporary training run, which exports it. A checkpoint for sampling is
    downloaded directly, which Fovea allows and hosted Tinker does not.

    Args:
        path: `tinker://RUN/weights/NAME`, `.../sampler_weights/NAME` or `.../external_weights/NAME`.
        folder: An existing folder for the files.
        base_url: Address of the server; None reads TINKER_BASE_URL.
        api_key: API key; None reads TINKER_API_KEY.
        on_bytes: Called with the number of bytes downloaded so far, and the number of bytes of all files.

    Raises:
        InvalidInput: The path is malformed, or the checkpoint is encrypted.
        NotFound: The checkpoint does not exist, or the server does not hand out weights for sampling.
        FailedPrecondition: No server is named, or it refuses to list the files of a checkpoint for sampling.
        Unavailable: The download was interrupted.
        Exception: An error of the SDK.
    """
    with _links(path, base_url, api_key) as links:
        if not links:
            raise NotFound(f"{path} has no files", field="path")
        if encrypted := [name for name in links if name.endswith(".age")]:
            raise InvalidInput(
                f"{path} is encrypted ({encrypted[0]}): export the training checkpoint instead", field="path"
            )
        with httpx.Client(timeout=_TIMEOUT_S, follow_redirects=True) as http:
            try:
                sizes = {name: int(http.head(url).headers.get("content-length", 0)) for name, url in links.items()}
                done, whole = 0, sum(sizes.values())
                for name, url in sorted(links.items()):
                    for count in _fetch(http, url, _place(folder, name)):
                        done += count
                        on_bytes(done, whole)
            except httpx.TransportError as error:
                raise Unavailable(f"the download of {path} was interrupted ({error!r}): start it again") from error


@contextmanager
def _links(path: str, base_url: str | None, api_key: str | None) -> Iterator[Mapping[str, str]]:
    """Yields a mapping from names of files to their URLs."""
    try:
        parsed = tinker.ParsedCheckpointTinkerPath.from_tinker_path(path)
    except ValueError as error:
        raise InvalidInput(f"{path!r} is not a checkpoint path: {error}", field="path") from None
    if parsed.checkpoint_type == "sampler":
        yield _links_of_sampler(parsed, base_url, api_key)
        return
    rest = tinker.RestClient(base_url=base_url, api_key=api_key)
    if parsed.checkpoint_type == "external":
        yield rest.get_external_weights_urls(path).result().urls
        return
    service = tinker.ServiceClient(base_url=base_url, api_key=api_key)
    try:
        training = service.create_training_client_from_state(path).result()
        name = f"export-{uuid.uuid4().hex[:8]}"
        exported = training.save_weights_external(name, ttl_seconds=_EXPORT_TTL_S).result().path
        try:
            yield rest.get_external_weights_urls(exported).result().urls
        finally:
            with contextlib.suppress(tinker.TinkerError):  # the export expires on its own
                rest.delete_checkpoint_from_tinker_path(exported).result()
    finally:
        service.close("success").result()


def _links_of_sampler(
    parsed: tinker.ParsedCheckpointTinkerPath, base_url: str | None, api_key: str | None
) -> Mapping[str, str]:
    """Returns the URLs of a checkpoint for sampling, over plain HTTP: the SDK supports external weights only."""
    server = base_url or os.environ.get("TINKER_BASE_URL")
    key = api_key or os.environ.get("TINKER_API_KEY")
    if not server or not key:
        raise FailedPrecondition(
            "no server address: give base_url and api_key, or set TINKER_BASE_URL and TINKER_API_KEY"
        )
    run, checkpoint = quote(parsed.training_run_id, safe=":"), quote(parsed.checkpoint_id)
    url = f"{server.rstrip('/')}/api/v1/training_runs/{run}/checkpoints/{checkpoint}/external_weights_urls"
    try:
        answer = httpx.get(url, headers={"X-API-Key": key}, timeout=_TIMEOUT_S)
    except httpx.TransportError as error:
        raise Unavailable(f"{server} cannot be reached: {error}") from error
    if answer.status_code == 404:
        raise NotFound(
            f"{parsed.tinker_path} does not exist, or this server does not hand out weights for sampling: export a"
            " training checkpoint, tinker://RUN/weights/NAME",
            field="path",
        )
    if answer.status_code != 200:
        raise FailedPrecondition(f"the server refuses {parsed.tinker_path}: {answer.status_code} {answer.text[:300]}")
    links: dict[str, str] = answer.json()["urls"]
    return links


def _place(folder: pathlib.Path, name: str) -> pathlib.Path:
    place = (folder / name).resolve()
    if not place.is_relative_to(folder.resolve()):
        raise Internal(f"the server sent the name of a file outside the folder: {name!r}")
    place.parent.mkdir(parents=True, exist_ok=True)
    return place


def _fetch(http: httpx.Client, url: str, place: pathlib.Path) -> Iterator[int]:
    """Writes a file; yields the number of bytes of each part."""
    with http.stream("GET", url) as answer, place.open("wb") as file:
        if answer.status_code != 200:
            raise Unavailable(f"{place.name} could not be downloaded: the server responded {answer.status_code}")
        for piece in answer.iter_bytes(2**20):
            file.write(piece)
            yield len(piece)
