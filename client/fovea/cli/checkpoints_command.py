"""`fovea checkpoints list | show | upload | delete`: manages the caller's checkpoints over the gateway's REST API."""

import json
import pathlib
import urllib.parse
from collections.abc import Iterator
from typing import Annotated, Any, BinaryIO

import httpx
import typer

from fovea.cli.state_folder import (
    DEFAULT_STATE_DIR,
    PUBLISHED_KEY,
    ApiKey,
    StateDir,
    folder_in_use,
    print_error,
    read_state,
)
from fovea.client.gateway import check_server
from fovea.wire.conventions import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from fovea.wire.errors import FailedPrecondition

app = typer.Typer(help="Manage checkpoints: saved training states and sampling weights.", no_args_is_help=True)

_SCHEME = "tinker://"
_PAGE = 1000
_TIMEOUT_S = 30.0

BaseUrl = Annotated[
    str,
    typer.Option(
        envvar="TINKER_BASE_URL", help="Base URL of the gateway's REST API. Default: the gateway of --state-dir."
    ),
]
Path = Annotated[
    str,
    typer.Argument(
        metavar="PATH", help="Checkpoint path, such as tinker://RUN/weights/NAME; `fovea checkpoints list` prints them."
    ),
]


class Gateway:
    """Client of a gateway's REST API, with one API key."""

    def __init__(self, base_url: str, state_dir: pathlib.Path, api_key: str) -> None:
        self._root = (base_url or read_state(folder_in_use(state_dir))["base_url"]).rstrip("/")
        try:
            check_server(self._root)
        except FailedPrecondition as error:
            raise typer.Exit(print_error(f"--base-url: {error.message}")) from None
        self._api_key = api_key
        # A single client, because each one loads all CA certificates of the machine.
        self._http = httpx.Client(timeout=_TIMEOUT_S)

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Returns the JSON answer to a request. If it fails, prints the gateway's error and ends the command."""
        answer = self._answer(method, f"{self._root}/api/v1/{path}", json=body, headers={"X-API-Key": self._api_key})
        found: dict[str, Any] = answer.json()
        return found

    def send(self, url: str, file: BinaryIO, size: int) -> None:
        """Streams a file of `size` bytes to an upload URL that the gateway issued."""
        self._answer("PUT", url, content=file, headers={"Content-Length": str(size)})

    def _answer(self, method: str, url: str, **request: Any) -> httpx.Response:
        try:
            answer = self._http.request(method, url, **request)
        except httpx.TransportError as error:
            raise typer.Exit(print_error(f"no answer from {self._root} ({error}); see fovea logs gateway")) from None
        if answer.is_error:
            raise typer.Exit(print_error(_reason(answer)))
        return answer

    def trainable_models(self) -> list[str]:
        """Returns the names of the base models that can be trained, the default model first."""
        models = self.ask("GET", "get_server_capabilities")["supported_models"]
        return [str(each["model_name"]) for each in models if each["trainable"]]

    def checkpoints(self) -> Iterator[dict[str, Any]]:
        """Yields all checkpoints of the caller."""
        return self._all("checkpoints")

    def run_names(self) -> dict[str, str]:
        """Returns the names of the caller's runs by id. Programs give them, such as `fine_tune`."""
        named = ((run["training_run_id"], run["user_metadata"]) for run in self._all("training_runs"))
        return {str(run): name for run, metadata in named if (name := metadata.get("name") or metadata.get("run_name"))}

    def _all(self, kind: str) -> Iterator[dict[str, Any]]:
        """Yields all entries of a listing, page by page."""
        offset = 0
        while page := self.ask("GET", f"{kind}?limit={_PAGE}&offset={offset}")[kind]:
            yield from page
            offset += len(page)


def _reason(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return f"{answer.status_code} {answer.reason_phrase}"


@app.command("list")
def list_checkpoints(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line, with every field.")] = False,
    base_url: BaseUrl = "",
    api_key: ApiKey = PUBLISHED_KEY,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """List your checkpoints, newest first, with creation time, size, expiry, name of the run and path."""
    gateway = Gateway(base_url, state_dir, api_key)
    found = sorted(gateway.checkpoints(), key=lambda each: str(each["time"]), reverse=True)
    names = gateway.run_names() if found and not as_json else {}
    width = max(map(len, names.values()), default=0)
    for each in found:
        if as_json:
            typer.echo(json.dumps(each))
        else:
            until = f"until {each['expires_at'][:16]}" if each["expires_at"] else "no expiry"
            size = f"{(each['size_bytes'] or 0) / 2**20:,.1f} MiB"
            name = names.get(each["tinker_path"].removeprefix(_SCHEME).partition("/")[0], "")
            typer.echo(f"{each['time'][:16]}  {size:>14}  {until:<22}  {name:<{width}}  {each['tinker_path']}")
    if not found and not as_json:
        typer.echo("no checkpoints yet; save_state and save_weights_for_sampler create them", err=True)


@app.command()
def show(
    path: Path, base_url: BaseUrl = "", api_key: ApiKey = PUBLISHED_KEY, state_dir: StateDir = DEFAULT_STATE_DIR
) -> None:
    """Print every field of one checkpoint as JSON. The checkpoint must be yours or readable with your key."""
    gateway = Gateway(base_url, state_dir, api_key)
    _parts(path)
    info = gateway.ask("POST", "weights_info", {"tinker_path": path})
    listed = next((each for each in gateway.checkpoints() if each["tinker_path"] == path), {})
    typer.echo(json.dumps({**listed, **info}, indent=2))


@app.command()
def upload(
    folder: Annotated[
        pathlib.Path,
        typer.Argument(
            metavar="FOLDER", help=f"LoRA adapter folder in PEFT format, with {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}."
        ),
    ],
    base_model: Annotated[
        str,
        typer.Option(
            help="Base model of the adapter. Default: the model named in its configuration, or the only trainable one."
        ),
    ] = "",
    base_url: BaseUrl = "",
    api_key: ApiKey = PUBLISHED_KEY,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Upload a LoRA adapter from this machine. Prints the tinker:// path that a training client can start from."""
    rank, named = _read_adapter(folder)
    gateway = Gateway(base_url, state_dir, api_key)
    if not base_model:
        models = gateway.trainable_models()
        if named not in models and len(models) != 1:
            raise typer.BadParameter(
                f"the adapter's configuration names no served model; choose one of {', '.join(models)}",
                param_hint="--base-model",
            )
        base_model = named if named in models else models[0]
    asked = {"base_model": base_model, "lora_config": {"rank": rank}}
    begun = gateway.ask("POST", "external_weights_upload_start", asked)
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        size = (folder / name).stat().st_size
        typer.echo(f"uploading {name} ({size / 2**20:,.1f} MiB) as an adapter of {base_model}", err=True)
        with (folder / name).open("rb") as file:
            gateway.send(begun["urls"][name], file, size)
    done = gateway.ask("POST", "external_weights_upload_finish", {"upload_id": begun["upload_id"]})
    typer.echo(done["tinker_path"])


def _read_adapter(folder: pathlib.Path) -> tuple[int, str]:
    """Returns the rank of a PEFT adapter folder and the base model named in it. Raises BadParameter."""
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (folder / name).is_file():
            raise typer.BadParameter(f"no {name} in {folder}; PEFT's save_pretrained writes it", param_hint="FOLDER")
    try:
        config = json.loads((folder / ADAPTER_CONFIG).read_bytes())
        return int(config["r"]), str(config.get("base_model_name_or_path"))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise typer.BadParameter(f"{ADAPTER_CONFIG} has no valid rank `r`: {error!r}", param_hint="FOLDER") from None


@app.command()
def delete(
    paths: Annotated[
        list[str], typer.Argument(metavar="PATH...", help="Checkpoint paths, as `fovea checkpoints list` prints them.")
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking for confirmation.")] = False,
    base_url: BaseUrl = "",
    api_key: ApiKey = PUBLISHED_KEY,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Delete checkpoints and their files permanently. Asks for confirmation unless --yes is given."""
    gateway = Gateway(base_url, state_dir, api_key)
    places = [_parts(path) for path in paths]
    if not yes:
        typer.confirm(f"Permanently delete {len(paths)} checkpoint(s)?", abort=True)
    for path, (run, segment, name) in zip(paths, places, strict=True):
        gateway.ask("DELETE", f"training_runs/{run}/checkpoints/{segment}/{name}")
        typer.echo(f"deleted {path}")


def _parts(path: str) -> list[str]:
    """Splits a path into run, kind and name, each quoted for a URL. Raises BadParameter."""
    parts = path.removeprefix(_SCHEME).split("/")
    if not path.startswith(_SCHEME) or len(parts) != 3 or not all(parts):
        raise typer.BadParameter(
            f"{path!r} does not have the form tinker://RUN/weights/NAME; see `fovea checkpoints list`",
            param_hint="PATH",
        )
    return [urllib.parse.quote(part, safe="") for part in parts]
