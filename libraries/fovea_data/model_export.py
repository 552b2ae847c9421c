"""Exports a checkpoint as files: `python -m fovea_data.model_export PATH DIR`, or `fovea export`.

The files are an adapter in PEFT's format, or the merged model as a Hugging Face checkpoint that transformers and vLLM
load. Both have the tokenizer, processor, chat template and generation settings.
"""

from __future__ import annotations

import json
import logging
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Self

os.environ.setdefault("TINKER_TELEMETRY", "0")

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn

from fovea.runtime.model_files import read_json
from fovea.wire.conventions import MAX_PICTURE_SIDE
from fovea.wire.errors import AlreadyExists, FailedPrecondition, InvalidInput
from fovea_data.base_model import base_directory, check_room, copy_small_files
from fovea_data.conversation import Asking
from fovea_data.served_limits import ask_limits, find_checkpoint, picture_side
from fovea_rollout.stopping import exiting_with_a_line

if TYPE_CHECKING:
    import tinker

logger = logging.getLogger(__name__)

_ADAPTER_CONFIG = "adapter_config.json"


def export_model(
    path: str,
    directory: str | pathlib.Path,
    *,
    merged: bool = False,
    base: str | pathlib.Path | None = None,
    base_url: str | None = None,
    api_key: str | None = None,
    progress: bool | None = None,
) -> pathlib.Path:
    """Writes a checkpoint of a running server into a new folder, which appears only when it is complete.

    A folder that already holds this export is left as it is.

    Args:
        path: `tinker://...`, a checkpoint of any type.
        directory: The folder, which must be empty or not exist, or hold the same export.
        merged: Whether to merge an adapter into its base model. Required for a checkpoint of full parameters.
        base: The base model's directory or hub name; None takes the name in the checkpoint.
        base_url: Address of a Tinker server; None reads TINKER_BASE_URL.
        api_key: API key; None reads TINKER_API_KEY.
        progress: Whether to show bars of progress; None shows them on a terminal, and elsewhere a line for each.

    Returns:
        The folder.

    Raises:
        AlreadyExists: The folder has other files.
        InvalidInput: `path` is malformed, or is a checkpoint of full parameters without `merged`; or the adapter does
            not fit the base model.
        NotFound: The checkpoint or the base model does not exist.
        ResourceExhausted: The disk has too little space.
        NotConnected: No server responds, or it refuses the API key.
        FailedPrecondition: torch, transformers or safetensors is not installed.
        Unavailable: The download was interrupted.
        Exception: An error of the SDK.
    """
    if not path.startswith("tinker://"):
        raise InvalidInput(f"{path!r} is not a checkpoint path: write tinker://RUN/KIND/NAME", field="path")
    folder = pathlib.Path(directory)
    has_files = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    if has_files and (base is not None or not _holds(folder, merged, _exported(path))):
        raise AlreadyExists(f"{folder} already has files: give a new folder", field="directory")
    ask_limits(base_url, api_key, progress)  # raises at once if no server responds or the key is wrong
    import tinker  # late, because it takes seconds

    from fovea_data.checkpoint_download import download_checkpoint

    folder.parent.mkdir(parents=True, exist_ok=True)
    found = find_checkpoint(tinker.RestClient(base_url=base_url, api_key=api_key), path)
    if has_files:
        if found is None or not _holds(folder, merged, _origin(path, found)):
            words = "an export of this path, perhaps of earlier weights: give a new folder"
            raise AlreadyExists(f"{folder} already has {words}", field="directory")
        logger.warning("%s already holds this export", folder)
        return folder
    notes: list[str] = []
    with _filled(folder) as staging, _Bars(progress) as bars:
        fetched, made = staging / "fetched", staging / "made"
        fetched.mkdir()
        download_checkpoint(path, fetched, base_url=base_url, api_key=api_key, on_bytes=bars.of("download"))
        if (fetched / _ADAPTER_CONFIG).is_file():
            name = str(base or read_json(fetched / _ADAPTER_CONFIG).get("base_model_name_or_path") or "")
            notes = _export_adapter(fetched, made, merged, name, bars)
        elif merged:
            name = str(base or "")
            fetched.rename(made)
        else:
            raise InvalidInput(
                f"{path} has full parameters and no adapter: export it with merged=True (--merged)", field="merged"
            )
        _describe(made, _origin(path, found), name, (found.user_metadata if found else None) or {}, notes)
    return folder


def _export_adapter(fetched: pathlib.Path, made: pathlib.Path, merged: bool, base: str, bars: _Bars) -> list[str]:
    """Makes an adapter or a merged model; returns paragraphs on how to load it."""
    try:
        from fovea_data import adapter_merge
    except ImportError as error:
        raise FailedPrecondition(
            f"install torch, transformers and safetensors to export an adapter: {error}"
        ) from error
    adapter_merge.spread_shared_experts(fetched)
    source = base_directory(base, with_weights=merged)
    if not merged:
        config = read_json(fetched / _ADAPTER_CONFIG) | {"base_model_name_or_path": base}
        notes = adapter_merge.notes_of(fetched, source)
        if "experts" in notes:
            config["fovea_note"] = notes["experts"]
        fetched.rename(made)
        # Without config.json, AutoProcessor loads only a tokenizer, and leaves pictures out silently.
        copy_small_files(source, made, but=(_ADAPTER_CONFIG,))
        (made / _ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        for note in notes.values():
            logger.warning("%s", note)
        return [*notes.values(), *([f"```python\n{adapter_merge.UNTIE}```"] if "tied" in notes else [])]
    made.mkdir()
    whole, told, done = adapter_merge.size_bytes(source), bars.of("merge"), 0
    check_room(made, whole)

    def on_bytes(count: int) -> None:
        nonlocal done
        done += count
        told(done, whole)

    adapter_merge.merge_adapter(fetched, source, made, on_bytes=on_bytes)
    return []


@contextmanager
def _filled(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a temporary folder beside `folder`. If the block succeeds, its subfolder `made` replaces `folder`."""
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as place:
        staging = pathlib.Path(place)
        yield staging
        if folder.exists():
            folder.rmdir()
        (staging / "made").rename(folder)


def _origin(path: str, found: tinker.types.Checkpoint | None) -> str:
    """Returns the sentence of a README on the origin of its weights."""
    return _exported(path) + (f", saved at {found.time.isoformat()}." if found else ".")


def _exported(path: str) -> str:
    return f"Exported from `{path}`"


def _holds(folder: pathlib.Path, merged: bool, origin: str) -> bool:
    """Returns whether a folder is an export of this kind and origin."""
    readme = folder / "README.md"
    has_kind = (folder / ("config.json" if merged else _ADAPTER_CONFIG)).is_file()
    has_kind &= merged != (folder / _ADAPTER_CONFIG).is_file()
    return has_kind and readme.is_file() and origin in readme.read_text(encoding="utf-8")


def _describe(folder: pathlib.Path, origin: str, base: str, metadata: Mapping[str, str], notes: list[str]) -> None:
    """Writes README.md for the hub, with the pictures' size and question in training, and notes on loading."""
    side, asking = picture_side(metadata, None), Asking.recorded(metadata)
    is_adapter = (folder / _ADAPTER_CONFIG).is_file()
    lines = ["---", f"library_name: {'peft' if is_adapter else 'transformers'}"]
    if base.count("/") == 1 and not base.startswith((".", "/", "~")):
        lines.append(f"base_model: {base}")
    if side is not None:
        lines.append(f"{MAX_PICTURE_SIDE}: {side}")
    lines += ["tags:", "- fovea", "---", "", origin, ""]
    if side is not None:
        lines += [
            f"Trained on pictures of at most {side} pixels on the longer side. Shrink larger pictures first, with"
            f" Pillow: `image.thumbnail(({side}, {side}), Image.Resampling.BICUBIC)`.",
            "",
        ]
    if asking is not None:
        lines += [
            "Trained with the picture first and then this text; ask with the same:",
            "",
            *_quoted(asking.question),
        ]
        if asking.system_prompt:
            lines += ["The system prompt was:", "", *_quoted(asking.system_prompt)]
    lines += [line for note in notes for line in (note, "")]
    (folder / "README.md").write_text("\n".join(lines), encoding="utf-8")


def _quoted(text: str) -> list[str]:
    return [*(f"    {line}" for line in text.splitlines()), ""]


class _Bars:
    """Bars of progress for the download and the merge. A context manager.

    Args:
        is_shown: Whether to show the bars; None shows them on a terminal, and elsewhere a plain line when each begins
            and at each tenth.
    """

    def __init__(self, is_shown: bool | None) -> None:
        console = Console(stderr=True)
        self._is_plain = is_shown is None and not console.is_terminal
        self._bars = Progress(
            TextColumn("{task.description:<8}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not (console.is_terminal if is_shown is None else is_shown),
        )

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._bars.stop()

    def of(self, name: str) -> Callable[[int, int], None]:
        """Returns a function that updates a new bar with the finished bytes and all bytes."""
        if self._is_plain:
            print(f"{name} ...", file=sys.stderr, flush=True)
        task, told = self._bars.add_task(name, total=None), 0

        def update(done: int, whole: int) -> None:
            nonlocal told
            self._bars.update(task, completed=done, total=max(whole, done))
            tenth = 10 * done // max(whole, done, 1)
            if self._is_plain and tenth > told:
                told = tenth
                print(f"{name} {10 * tenth} % of {whole / 1e6:.1f} MB", file=sys.stderr, flush=True)

        return update


def main(
    path: Annotated[str, typer.Argument(help="Path of a training, sampler or external checkpoint, tinker://...")],
    directory: Annotated[pathlib.Path, typer.Argument(metavar="DIR", help="A new folder for the files.")],
    merged: Annotated[bool, typer.Option("--merged", help="Merge the adapter into its base model.")] = False,
    push: Annotated[
        str, typer.Option("--push-to-hub", metavar="REPO", help="Also upload the folder to OWNER/NAME on the hub.")
    ] = "",
    public: Annotated[
        bool, typer.Option("--public", help="Make a new repository public; the default is private.")
    ] = False,
    base: Annotated[
        str, typer.Option(help="Directory or hub name of the base model; default: its name on the server.")
    ] = "",
    base_url: Annotated[
        str, typer.Option(envvar="TINKER_BASE_URL", help="Address of the server.")
    ] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str, typer.Option(envvar="TINKER_API_KEY", help="API key of the server; better set as variable.")
    ] = "tml-local",
) -> None:
    """Write a checkpoint as a PEFT adapter, or as a merged model that transformers and vLLM load."""
    if push and push.count("/") != 1:
        raise typer.BadParameter(f"{push!r} is not OWNER/NAME", param_hint="--push-to-hub")
    with exiting_with_a_line():
        folder = export_model(path, directory, merged=merged, base=base or None, base_url=base_url, api_key=api_key)
        print(f"written: {folder}")
        if push:
            from fovea_data.hub_upload import push_to_hub

            print(f"pushed: {push_to_hub(folder, push, private=not public)}")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False)
    app.command()(main)
    app(prog_name="fovea export")
