"""Uploads an exported model to the Hugging Face hub."""

from __future__ import annotations

import pathlib

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from fovea.wire.errors import FoveaError, InvalidInput, NotFound, PermissionDenied, Unavailable

_KNOWN = ("adapter_config.json", "config.json")


def push_to_hub(
    folder: str | pathlib.Path,
    repo: str,
    *,
    private: bool = True,
    token: str | None = None,
    message: str = "Upload a model exported by Fovea",
) -> str:
    """Uploads a folder of `export_model` in one commit, and creates the repository if it does not exist.

    Args:
        folder: Folder with an adapter or a merged checkpoint.
        repo: `OWNER/NAME` on the hub.
        private: Whether a new repository is visible to its owner only.
        token: Token of the hub; None takes HF_TOKEN, or the token of `hf auth login`.
        message: Message of the commit.

    Returns:
        The URL of the commit.

    Raises:
        NotFound: The folder does not exist or contains no model.
        InvalidInput: `repo` is malformed.
        PermissionDenied: The hub refuses the token, or there is no token.
        Unavailable: The hub cannot be reached, or refuses the upload for another reason.
    """
    path = pathlib.Path(folder)
    if not any((path / name).is_file() for name in _KNOWN):
        raise NotFound(f"{path} has no model: it must contain one of {', '.join(_KNOWN)}", field="folder")
    if repo.count("/") != 1:
        raise InvalidInput(f"repo is {repo!r}; write OWNER/NAME", field="repo")
    api = HfApi(token=token)
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        commit = api.upload_folder(repo_id=repo, folder_path=path, commit_message=message)
    except HFValidationError as error:
        raise InvalidInput(f"repo: {error}", field="repo") from error
    except HfHubHTTPError as error:
        raise _refusal(error, repo) from error
    except Exception as error:  # of the HTTP library, which differs between versions
        raise Unavailable(
            f"the hub at {constants.ENDPOINT} cannot be reached ({error}); the export is in {path}, and"
            f" `hf upload {repo} {path}` uploads it later"
        ) from error
    return str(commit.commit_url)


def _refusal(error: HfHubHTTPError, repo: str) -> FoveaError:
    said = " ".join(str(error).split())
    if error.response.status_code in (401, 403):
        return PermissionDenied(
            f"the hub denies writing to {repo}: log in with `hf auth login`, or set HF_TOKEN to a token that may"
            f" write ({said})"
        )
    return Unavailable(f"the hub refused the upload to {repo}: {said}")
