"""Finds a checkpoint on disk or on the hub, and downloads it if needed, unless Fovea does not support it."""

from __future__ import annotations

import pathlib
import shutil

from huggingface_hub import constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
)

from fovea.runtime.model_files import check_directory, check_supported, read_config

FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
"""Files that the services read. Weights in other formats, and code, are not downloaded."""

_GIB = 2**30


class CannotTry(Exception):
    """Raised if a model cannot be tried; the message says why in one line."""


def checkpoint(model: str) -> pathlib.Path:
    """Returns the directory of a checkpoint: `model` itself, or the download of a name on the hub.

    Raises CannotTry if Fovea does not support the model, if it cannot be downloaded, or if the disk is too small.
    """
    directory = pathlib.Path(model).expanduser()
    try:
        check_supported(read_config(model, hf_hub_download))
        if not directory.is_dir():
            directory = _download(model)
        check_directory(directory)
    except GatedRepoError as error:
        raise CannotTry(
            f"{model} is gated: accept its terms at {_page(model)}, then run `hf auth login`, or set HF_TOKEN"
        ) from error
    except (RepositoryNotFoundError, RemoteEntryNotFoundError, HFValidationError) as error:
        raise CannotTry(f"{model} is neither a directory nor a model on the hub that you may see") from error
    except LocalEntryNotFoundError as error:
        raise CannotTry(
            f"{model} is not on this machine, and the hub cannot be reached: give a directory, or connect to a network"
        ) from error
    except HfHubHTTPError as error:
        raise CannotTry(f"the hub refused {model}: {' '.join(str(error).split())}") from error
    except ValueError as error:
        raise CannotTry(
            f"{model}: {error}; to see which components work, run: fovea models check {directory}"
        ) from error
    except OSError as error:  # no such directory, or the disk is full
        raise CannotTry(f"{model}: {error}") from error
    return directory


def _download(model: str) -> pathlib.Path:
    missing = [one for one in snapshot_download(model, allow_patterns=FILES, dry_run=True) if one.will_download]
    check_room(model, sum(one.file_size or 0 for one in missing), pathlib.Path(constants.HF_HUB_CACHE))
    return pathlib.Path(snapshot_download(model, allow_patterns=FILES))


def check_room(model: str, size: int, cache: pathlib.Path) -> None:
    """Raises CannotTry if a model's bytes do not fit into the cache, which is created if it does not exist."""
    cache.mkdir(parents=True, exist_ok=True)
    if size > (free := shutil.disk_usage(cache).free):
        raise CannotTry(
            f"{model} needs {size / _GIB:.1f} GiB; {cache} has {free / _GIB:.1f} GiB free: make room, or set HF_HOME "
            "to a larger disk"
        )


def _page(model: str) -> str:
    return f"{constants.ENDPOINT}/{model}"
