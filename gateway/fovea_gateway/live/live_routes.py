"""Serves the files of the live page and its data. Keys, usage and checkpoints have routes of their own.

The page itself contains no data of any owner. Its user enters a key, which the page sends as any client does.
"""

import asyncio
import hashlib
import json
import math
import time
import zlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from fovea.wire.errors import FoveaError, InvalidInput, NotFound
from fovea_gateway.access.api_keys import CALLER, Caller, Scope
from fovea_gateway.access.audit_log import VALUES
from fovea_gateway.access.owners import Quota
from fovea_gateway.http.endpoint import Endpoints, Json, accepted_encoding, check_query, compress, count_of, key_of
from fovea_gateway.http.request_body import Body, Number, parse_json, read
from fovea_gateway.live.live_state import AnswerCounts
from fovea_gateway.live.live_view import LiveView
from fovea_gateway.live.sample_gallery import Group, Wanted
from fovea_gateway.live.step_curves import LARGEST
from fovea_gateway.training.models import Models

_FOLDER = Path(__file__).parent / "page"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_EVENT_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no", "X-Content-Type-Options": "nosniff"}

PERIOD_S = 1.0
"""The shortest time between two events of one section, in seconds."""
_ALIVE_S = 15.0
_STREAMS = 512
_GZIP_LEVEL = 3
_GZIP_FORMAT = 31  # zlib's number for a gzip header and the largest window
_POINTS = 300
_MOST_POINTS = 1024
_MOST_HOURS = 24
_MOST_SEARCHED = 200
_MOST_LEVEL = 100
_FOUND = 24
_SEARCHED_TOKENS = 400_000
"""Tokens that one search reads as texts: about half a second."""

Name = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.\-/@ ]+$")]
Text = Annotated[str, Field(max_length=4096)]
_LINE = r"^[^\x00-\x1f\x7f]*$"
_PRINTED = r"^[^\x00-\x08\x0b-\x1f\x7f]*$"
_TAG = r"^[^\x00-\x20,\x7f]+$"
"""A tag has no spaces and no commas, so that people can type several."""


def _drawable(value: float) -> float:
    """Returns a value. Raises ValueError if it is finite but makes sums overflow. NaN and infinity are allowed."""
    if LARGEST < abs(value) < math.inf:
        raise ValueError(f"must be at most {LARGEST:g} in magnitude")
    return value


Value = Annotated[float, AfterValidator(_drawable)]


class Judgement(Body):
    """A client's judgement of a sampled sequence."""

    sequence_id: str
    reward: Value | None = Field(None, allow_inf_nan=False)
    truth: Text = ""
    held_out: bool = False


class Report(Body):
    """The body of POST live/reports."""

    model_id: str
    step: Number | None = None
    metrics: Annotated[dict[Name, Value], Field(max_length=16)] = Field({})
    samples: Annotated[list[Judgement], Field(max_length=1024)] = Field([])
    answers: AnswerCounts | None = None


class Label(Body):
    """The body of PUT live/runs/{run}: the label that replaces the run's earlier one, unless `only_if_none`."""

    name: Annotated[str, Field(max_length=120, pattern=_LINE)] = ""
    notes: Annotated[str, Field(max_length=2000, pattern=_PRINTED)] = ""
    tags: Annotated[list[Annotated[str, Field(min_length=1, max_length=40, pattern=_TAG)]], Field(max_length=16)] = (
        Field([])
    )
    only_if_none: bool = False


class LiveRoutes:
    """Handlers of the page.

    Args:
        identify: Returns the caller that an API key identifies. Raises Unauthenticated once the key is revoked.
        base_path: The prefix of all paths, without a trailing slash.
        read_logs: Returns log lines of a service, or of all for an empty name, of at least a level with a text.
    """

    def __init__(
        self,
        view: LiveView,
        models: Models,
        identify: Callable[[str | None], Caller],
        base_path: str,
        read_logs: Callable[[str, int, str], Awaitable[Any]],
    ) -> None:
        self._view, self._models, self._identify, self._base_path = view, models, identify, base_path
        self._read_logs = read_logs
        self._streams = Quota("live streams", _STREAMS, "open pages")

    def routes(self, endpoints: Endpoints) -> list[Route]:
        page = [Route(f"{self._base_path}/", self.page), Route(f"{self._base_path}/page/{{file}}", self.file)]
        if self._base_path:
            page.append(Route(self._base_path, self.slash))
        return [
            *page,
            endpoints.route("GET", "live/events", self.events, Scope.READ),
            endpoints.route("GET", "live/curves/{run}", self.curves, Scope.READ),
            endpoints.route("GET", "live/system", self.system, Scope.ADMIN),
            endpoints.route("GET", "live/logs", self.logs, Scope.ADMIN),
            endpoints.route("GET", "live/samples", self.samples, Scope.READ),
            endpoints.route("GET", "live/datums", self.datums, Scope.READ),
            endpoints.route("GET", "live/pictures/{digest}", self.picture, Scope.READ),
            endpoints.route("POST", "live/reports", self.report, Scope.TRAIN),
            endpoints.route("PUT", "live/runs/{run}", self.label, Scope.TRAIN),
        ]

    async def page(self, request: Request) -> Response:
        """Returns the page itself, which is the same for all users."""
        return _file_response(request, "index.html")

    async def file(self, request: Request) -> Response:
        """Returns a file that the page loads."""
        name = request.path_params["file"]
        if name not in page_files():
            return Json({"detail": f"the page has no file {name[:80]!r}"}, status_code=404)
        return _file_response(request, name)

    async def slash(self, request: Request) -> Response:
        """Redirects to the address with a trailing slash, because the page's links are relative."""
        return RedirectResponse(f"{self._base_path}/", status_code=308)

    async def events(self, request: Request, owner: str) -> Response:
        """Streams server-sent events: each section when it has changed, at most once a second."""
        check_query(request)
        with self._streams.holding(owner) as use:
            use.take(1)  # Raises if there are too many streams. A running stream counts itself.
        stream, headers = self._stream(CALLER.get(), key_of(request)), dict(_EVENT_HEADERS)
        if accepted_encoding(request.headers.get("accept-encoding", "").replace("zstd", "")) is None:
            return StreamingResponse(stream, media_type="text/event-stream", headers=headers)
        headers |= {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
        return StreamingResponse(_gzipped(stream), media_type="text/event-stream", headers=headers)

    async def curves(self, request: Request, owner: str) -> Response:
        """Returns the curves of a model with at most `points` points; `name`, `first` and `last` select some."""
        check_query(request, "points", "name", "first", "last")
        query = request.query_params
        most = min(max(count_of(request, "points", _POINTS), 2), _MOST_POINTS)
        steps = count_of(request, "first", 0), count_of(request, "last", 0) if "last" in query else None
        owner_seen, run = _visible_owner(CALLER.get()), request.path_params["run"]
        found = await self._view.curves(owner_seen, run, most, set(query.getlist("name")), steps)
        return await compress(_json(found), request.headers.get("accept-encoding", ""))

    async def system(self, request: Request, owner: str) -> Response:
        """Returns the figures of the services in the last `hours`, with at most `points` points each."""
        check_query(request, "hours", "points")
        hours = min(max(count_of(request, "hours", 1), 1), _MOST_HOURS)
        most = min(max(count_of(request, "points", _POINTS), 2), _MOST_POINTS)
        found = self._view.history.points(hours * 3600, most)
        return await compress(_json(found), request.headers.get("accept-encoding", ""))

    async def logs(self, request: Request, owner: str) -> Response:
        """Returns the newest log lines of the services, the oldest first, and the services that do not answer."""
        check_query(request, "service", "level", "text")
        query, level = request.query_params, min(count_of(request, "level", 0), _MOST_LEVEL)
        found = await self._read_logs(query.get("service", ""), level, query.get("text", "")[:_MOST_SEARCHED])
        return await compress(_json(found), request.headers.get("accept-encoding", ""))

    async def samples(self, request: Request, owner: str) -> Response:
        """Returns the groups of one step of one source, which is a model's id or a base model's name, or those that
        match a search.

        They are the caller's own, or for the scope admin those of another owner.
        """
        check_query(request, "source", "step", "owner", *Wanted._fields)
        query = request.query_params
        asked = _asked_owner(request, owner, "samples")
        source, step = query.get("source", ""), count_of(request, "step", 0) if "step" in query else None
        wanted = _wanted(request)
        if wanted is None:
            found = await asyncio.to_thread(self._view.samples, asked, source, step)
        else:
            groups = self._view.state.gallery.all_groups(asked, source)
            found = await asyncio.to_thread(self._search, asked, source, groups, wanted)
        return await compress(_json(found), request.headers.get("accept-encoding", ""))

    async def datums(self, request: Request, owner: str) -> Response:
        """Returns the datums of a model with the largest loss per token in the last `steps` kept steps, the largest
        first; one's own, or for the scope admin those of another owner.
        """
        check_query(request, "source", "owner", "steps")
        asked, source = _asked_owner(request, owner, "datums"), request.query_params.get("source", "")
        groups = self._view.state.datums.worst(asked, source, max(count_of(request, "steps", 1), 1), _FOUND)
        found = await asyncio.to_thread(self._view.shown, asked, source, groups)
        return await compress(_json(found), request.headers.get("accept-encoding", ""))

    def _search(self, owner: str, source: str, groups: Sequence[Group], wanted: Wanted) -> dict[str, Any]:
        """Finds the sequences that match, in the order of the groups. Blocks: it reads texts."""
        found: list[Group] = []
        left = _SEARCHED_TOKENS
        for group in groups:
            if left <= 0 or len(found) >= _FOUND:
                break
            kept, read = wanted.matching(group, self._view.tokenizer_of(group.base_model))
            left -= read
            if kept:
                found.append(replace(group, drawn=deque(kept)))
        return self._view.shown(owner, source, found) | {"is_partial": left <= 0 or len(found) >= _FOUND}

    async def picture(self, request: Request, owner: str) -> Response:
        """Returns a picture of a sample or a datum. Raises NotFound if there is none or it belongs to another owner."""
        digest = request.path_params["digest"]
        owner_seen, state = _visible_owner(CALLER.get()), self._view.state
        picture = state.gallery.picture(owner_seen, digest) or state.datums.picture(owner_seen, digest)
        if picture is None or not picture.media_type:
            raise NotFound(f"there is no picture {digest[:64]!r}, or it has been deleted", field="digest")
        headers = {"X-Content-Type-Options": "nosniff", "Cache-Control": "private, max-age=3600"}
        return Response(picture.data, media_type=picture.media_type, headers=headers)

    async def report(self, request: Request, owner: str) -> Response:
        """Accepts a client's own values: metrics of a step, such as reward or KL, and judgements of samples."""
        body = await parse_json(request, Report, await read(request))
        model = await self._models.get(owner, body.model_id)
        state = self._view.state
        if body.step is not None and body.step > (last := (await state.curves(model.model_id)).last_step) + 1:
            raise InvalidInput(
                f"step is {body.step}; the model has taken {last} optimizer steps: leave step out for the last one",
                field="step",
            )
        rewards = [one.reward for one in body.samples if one.reward is not None and not one.held_out]
        step = await state.report(model.model_id, body.step, body.metrics, rewards, body.answers)
        judge = state.gallery.judge
        kept = [judge(owner, one.sequence_id, one.reward, one.truth, one.held_out) for one in body.samples]
        return Json({"step": step, "samples_kept": sum(kept)})

    async def label(self, request: Request, owner: str) -> Response:
        """Stores the name, the notes and the tags that people give to a model of the caller."""
        model = await self._models.get(owner, request.path_params["run"])
        body = await parse_json(request, Label, await read(request))
        values = {"name": body.name.strip(), "notes": body.notes.strip(), "tags": list(dict.fromkeys(body.tags))}
        VALUES.set(stored := await self._view.put_label(model, values, body.only_if_none))
        return Json({"model_id": model.model_id} | stored)

    async def _stream(self, caller: Caller, key: str | None) -> AsyncGenerator[str]:
        sent: dict[str, Any] = {}
        said_at = time.monotonic()
        with self._streams.holding(caller.owner) as use:
            use.take(1)
            yield event("caller", {"owner": caller.owner, "key_id": caller.key_id, "scope": caller.scope.value})
            while not self._view.closing.is_set():
                try:
                    self._identify(key)
                except FoveaError as error:
                    yield event("refused", {"detail": error.message})
                    return
                events = changes(await self._view.sections(_visible_owner(caller)), sent)
                if events or time.monotonic() - said_at > _ALIVE_S:
                    said_at = time.monotonic()
                    yield "".join(events) or ": nothing new\n\n"
                try:
                    await asyncio.wait_for(self._view.closing.wait(), PERIOD_S)
                except TimeoutError:
                    continue


def _asked_owner(request: Request, owner: str, what: str) -> str:
    """Returns the owner that the query names, by default the caller. Raises PermissionDenied for another owner."""
    asked = request.query_params.get("owner", owner)
    if asked != owner:
        CALLER.get().require(Scope.ADMIN, f"{what} of other owners")
    return asked


def _wanted(request: Request) -> Wanted | None:
    """Reads a search from a query string; None if there is none. Raises InvalidInput."""
    query = request.query_params
    if not any(name in query for name in Wanted._fields):
        return None

    def reward(name: str) -> float | None:
        return _reward_of(query[name], name) if name in query else None

    def step(name: str) -> int | None:
        return count_of(request, name, 0) if name in query else None

    text = query.get("text", "")[:_MOST_SEARCHED]
    return Wanted(text, reward("least_reward"), reward("most_reward"), step("first_step"), step("last_step"))


def _reward_of(given: str, field: str) -> float:
    try:
        return float(given)
    except ValueError:
        raise InvalidInput(f"{field} is {given[:40]!r}; it must be a number", field=field) from None


async def _gzipped(texts: AsyncGenerator[str]) -> AsyncIterator[bytes]:
    """Compresses a stream. Each text can be decompressed at once."""
    compressor = zlib.compressobj(_GZIP_LEVEL, wbits=_GZIP_FORMAT)
    async with aclosing(texts):
        async for text in texts:
            yield compressor.compress(text.encode()) + compressor.flush(zlib.Z_SYNC_FLUSH)


def changes(sections: dict[str, Any], sent: dict[str, Any]) -> list[str]:
    """Returns events for the sections that differ from those sent, and updates `sent`.

    The event of the section `models` contains the changed models and the ids of all.
    """
    events = []
    for name, section in sections.items():
        if sent.get(name) == section:
            continue
        data = section
        if name == "models":
            before = sent.get(name, {})
            changed = [model for model_id, model in section.items() if before.get(model_id) != model]
            data = {"changed": changed, "order": list(section)}
        sent[name] = section
        events.append(event(name, data))
    return events


def event(name: str, data: Any) -> str:
    """Returns a server-sent event."""
    return f"event: {name}\ndata: {to_text(data)}\n\n"


def _visible_owner(caller: Caller) -> str | None:
    """Returns the owner of the data that a caller may see; None, for the scope admin, means all owners."""
    return None if caller.scope.includes(Scope.ADMIN) else caller.owner


def _json(found: Any) -> Response:
    return Response(to_text(found), media_type="application/json", headers={"Cache-Control": "no-store"})


@cache
def page_files() -> dict[str, tuple[bytes, str]]:
    """Returns the page's files and their entity tags, keyed by file name."""
    files = {path.name: path.read_bytes() for path in _FOLDER.iterdir() if path.suffix in _TYPES}
    return {name: (data, f'"{hashlib.sha256(data).hexdigest()[:16]}"') for name, data in files.items()}


def _file_response(request: Request, name: str) -> Response:
    data, tag = page_files()[name]
    headers = {**_HEADERS, "ETag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(data, media_type=_TYPES[Path(name).suffix], headers=headers)


def to_text(section: Any) -> str:
    """Returns JSON that browsers can parse. A number that is not finite becomes null, so it cannot end a stream."""
    try:
        return json.dumps(section, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return json.dumps(_without_nan(section), separators=(",", ":"), allow_nan=False)


def _without_nan(section: Any) -> Any:
    """Returns a copy of JSON values with None in place of numbers that are not finite."""
    if isinstance(section, dict):
        return {name: _without_nan(value) for name, value in section.items()}
    if isinstance(section, list | tuple):
        return [_without_nan(value) for value in section]
    return None if isinstance(section, float) and not math.isfinite(section) else section
