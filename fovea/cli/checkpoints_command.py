"""`fovea checkpoints list | show | upload | delete`: what the caller has saved, through the gateway's REST API."""

import json
import pathlib
import urllib.parse
from collections.abc import Iterator
from typing import Annotated, Any, BinaryIO

import httpx
import typer

from fovea.cli.local_fovea import (
    DEFAULT_STATE_DIR,
    PUBLISHED_KEY,
    ApiKey,
    StateDir,
    complain,
    folder_in_use,
    read_state,
)
from fovea.wire.conventions import ADAPTER_CONFIG, ADAPTER_WEIGHTS

app = typer.Typer(help="What you have saved: states to train on from, and weights to sample.", no_args_is_help=True)

_SCHEME = "tinker://"
_PAGE = 1000
_TIMEOUT_S = 30.0

BaseUrl = Annotated[
    str,
    typer.Option(envvar="TINKER_BASE_URL", help="Where a gateway's REST API is; default: that of --state-dir."),
]
Path = Annotated[str, typer.Argument(metavar="PATH", help="As in tinker://RUN/weights/NAME; `list` shows them.")]


class Gateway:
    """A gateway's REST API, asked with one key."""

    def __init__(self, base_url: str, state_dir: pathlib.Path, api_key: str) -> None:
        self._root = (base_url or read_state(folder_in_use(state_dir))["base_url"]).rstrip("/")
        self._api_key = api_key
        self._http = httpx.Client(timeout=_TIMEOUT_S)  # one: each reads all certificates of the machine

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The answer to a request. Ends the command with the gateway's own words if it refuses."""
        answer = self._answer(method, f"{self._root}/api/v1/{path}", json=body, headers={"X-API-Key": self._api_key})
        found: dict[str, Any] = answer.json()
        return found

    def send(self, url: str, file: BinaryIO, size: int) -> None:
        """Puts a file of so many bytes to a link that the gateway gave, piece by piece."""
        self._answer("PUT", url, content=file, headers={"Content-Length": str(size)})

    def _answer(self, method: str, url: str, **request: Any) -> httpx.Response:
        try:
            answer = self._http.request(method, url, **request)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise typer.Exit(complain(f"--base-url: {self._root} does not answer ({error})")) from None
        if answer.is_error:
            raise typer.Exit(complain(_reason(answer)))
        return answer

    def trainable_models(self) -> list[str]:
        """Names of the base models that can be trained, the default one first."""
        models = self.ask("GET", "get_server_capabilities")["supported_models"]
        return [str(each["model_name"]) for each in models if each["trainable"]]

    def checkpoints(self) -> Iterator[dict[str, Any]]:
        """All of the caller."""
        offset = 0
        while page := self.ask("GET", f"checkpoints?limit={_PAGE}&offset={offset}")["checkpoints"]:
            yield from page
            offset += len(page)


def _reason(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return f"{answer.status_code} {answer.reason_phrase}"


@app.command("list")
def list_checkpoints(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line, with all that is known.")] = False,
    base_url: BaseUrl = "",
    api_key: ApiKey = PUBLISHED_KEY,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Show your checkpoints, newest first: when, how large, until when, which."""
    found = sorted(
        Gateway(base_url, state_dir, api_key).checkpoints(), key=lambda each: str(each["time"]), reverse=True
    )
    for each in found:
        if as_json:
            typer.echo(json.dumps(each))
        else:
            until = f"until {each['expires_at'][:16]}" if each["expires_at"] else "kept"
            size = f"{(each['size_bytes'] or 0) / 2**20:,.1f} MiB"
            typer.echo(f"{each['time'][:16]}  {size:>14}  {until:<22}  {each['tinker_path']}")
    if not found and not as_json:
        typer.echo("no checkpoints: save_state and save_weights_for_sampler make them", err=True)


@app.command()
def show(
    path: Path, base_url: BaseUrl = "", api_key: ApiKey = PUBLISHED_KEY, state_dir: StateDir = DEFAULT_STATE_DIR
) -> None:
    """Show all that is known of a checkpoint, one you may read, as JSON."""
    gateway = Gateway(base_url, state_dir, api_key)
    _parts(path)
    info = gateway.ask("POST", "weights_info", {"tinker_path": path})
    listed = next((each for each in gateway.checkpoints() if each["tinker_path"] == path), {})
    typer.echo(json.dumps({**listed, **info}, indent=2))


@app.command()
def upload(
    folder: Annotated[
        pathlib.Path,
        typer.Argument(metavar="FOLDER", help=f"A LoRA as PEFT saves it: {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}."),
    ],
    base_model: Annotated[
        str, typer.Option(help="What it adapts; default: the model that its configuration names, or the only one here.")
    ] = "",
    base_url: BaseUrl = "",
    api_key: ApiKey = PUBLISHED_KEY,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Send an adapter from elsewhere; prints the path from which a training client is created."""
    rank, named = _read_adapter(folder)
    gateway = Gateway(base_url, state_dir, api_key)
    if not base_model:
        models = gateway.trainable_models()
        if named not in models and len(models) != 1:
            raise typer.BadParameter(f"name one of {', '.join(models)}", param_hint="--base-model")
        base_model = named if named in models else models[0]
    asked = {"base_model": base_model, "lora_config": {"rank": rank}}
    begun = gateway.ask("POST", "external_weights_upload_start", asked)
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        size = (folder / name).stat().st_size
        typer.echo(f"sending {name}, {size / 2**20:,.1f} MiB, as an adapter of {base_model}", err=True)
        with (folder / name).open("rb") as file:
            gateway.send(begun["urls"][name], file, size)
    done = gateway.ask("POST", "external_weights_upload_finish", {"upload_id": begun["upload_id"]})
    typer.echo(done["tinker_path"])


def _read_adapter(folder: pathlib.Path) -> tuple[int, str]:
    """Rank of a PEFT folder's adapter, and the base model that it names. Raises BadParameter."""
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (folder / name).is_file():
            raise typer.BadParameter(f"no {name} in {folder}; PEFT's save_pretrained writes it", param_hint="FOLDER")
    try:
        config = json.loads((folder / ADAPTER_CONFIG).read_bytes())
        return int(config["r"]), str(config.get("base_model_name_or_path"))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise typer.BadParameter(f"{ADAPTER_CONFIG} has no rank r: {error!r}", param_hint="FOLDER") from None


@app.command()
def delete(
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="As `list` shows them.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    base_url: BaseUrl = "",
    api_key: ApiKey = PUBLISHED_KEY,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Delete checkpoints for good, with their files."""
    gateway = Gateway(base_url, state_dir, api_key)
    places = [_parts(path) for path in paths]
    if not yes:
        typer.confirm(f"Delete {len(paths)} checkpoint(s) for good?", abort=True)
    for path, (run, segment, name) in zip(paths, places, strict=True):
        gateway.ask("DELETE", f"training_runs/{run}/checkpoints/{segment}/{name}")
        typer.echo(f"deleted {path}")


def _parts(path: str) -> list[str]:
    """Run, kind and name, as a URL has them. Raises BadParameter."""
    parts = path.removeprefix(_SCHEME).split("/")
    if not path.startswith(_SCHEME) or len(parts) != 3 or not all(parts):
        raise typer.BadParameter(
            f"{path!r} is not tinker://RUN/weights/NAME; see `fovea checkpoints list`", param_hint="PATH"
        )
    return [urllib.parse.quote(part, safe="") for part in parts]
