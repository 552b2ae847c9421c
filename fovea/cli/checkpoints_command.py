"""`fovea checkpoints list | show | delete`: what the caller has saved, through the gateway's REST API."""

import json
import pathlib
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from fovea.cli.local_fovea import DEFAULT_STATE_DIR, PUBLISHED_KEY, ApiKey, StateDir, complain, read_state

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
        self._root = (base_url or read_state(state_dir)["base_url"]).rstrip("/")
        self._api_key = api_key

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The answer to a request. Ends the command with the gateway's own words if it refuses."""
        headers = {"X-API-Key": self._api_key, "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._root}/api/v1/{path}", data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except urllib.error.HTTPError as error:
            raise typer.Exit(complain(_reason(error))) from None
        except OSError as error:
            reason = getattr(error, "reason", error)
            raise typer.Exit(complain(f"--base-url: {self._root} does not answer ({reason})")) from None

    def checkpoints(self) -> Iterator[dict[str, Any]]:
        """All of the caller."""
        offset = 0
        while page := self.ask("GET", f"checkpoints?limit={_PAGE}&offset={offset}")["checkpoints"]:
            yield from page
            offset += len(page)


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["detail"])
    except (ValueError, KeyError, TypeError):
        return f"{error.code} {error.reason}"


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
