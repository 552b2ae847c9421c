"""Routes of exports: links for those who have a key, files for those who have a link."""

import re
from datetime import UTC, datetime
from urllib.parse import quote, urlencode

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from fovea.wire.errors import InvalidInput
from gateway.checkpoints.exports import Exports, Link
from gateway.http.endpoint import Endpoints, Json
from gateway.identity import EXTERNAL, Caller, CheckpointPath

_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})")
_MEDIA_TYPE = "application/octet-stream"


class ExportRoutes:
    """Handlers of exports.

    Args:
        base_path: In front of all paths, without trailing slash.
    """

    def __init__(self, exports: Exports, base_path: str) -> None:
        self._exports, self._base_path = exports, base_path

    def routes(self, endpoints: Endpoints) -> list[Route]:
        """All of them."""
        # Of all segments only this one: for the others the path below does not exist.
        links = f"training_runs/{{run}}/checkpoints/{EXTERNAL}/{{name}}/external_weights_urls"
        return [
            endpoints.route("GET", links, self.links),
            endpoints.keyless_route("GET", "exports/{run}/{name}/{file:path}", self.file),
        ]

    async def links(self, request: Request, caller: Caller) -> Response:
        """A signed URL for each file, on the host that the client used, and when they expire."""
        run, name = request.path_params["run"], request.path_params["name"]
        links, expires_at = await self._exports.links(caller, str(CheckpointPath(run, EXTERNAL, name)))
        root = f"{request.url.scheme}://{request.url.netloc}{self._base_path}/api/v1/exports"
        urls = {link.file: f"{root}/{_path(link)}" for link in links}
        return Json({"urls": urls, "expires": datetime.fromtimestamp(expires_at, UTC).isoformat()})

    async def file(self, request: Request) -> Response:
        """A file, or one range of it; HEAD is answered too."""
        parts, query = request.path_params, request.query_params
        try:
            expires_at = int(query.get("expires", ""))
        except ValueError:
            raise InvalidInput("expires is missing from this link, or is no number", field="expires") from None
        link = Link(parts["run"], parts["name"], parts["file"], expires_at, query.get("signature", ""))
        file = await self._exports.follow(link)
        # The folder of an export is never written twice, so its name says which content this is.
        tag = f'"{file.uri.rpartition(".")[2]}-{file.size_bytes}"'
        asked = parse_range(request.headers.get("range"), file.size_bytes)
        if request.headers.get("if-range", tag) != tag:
            asked = None
        headers = {"Accept-Ranges": "bytes", "ETag": tag, "X-Content-Type-Options": "nosniff"}
        if asked is not None and not asked:
            headers["Content-Range"] = f"bytes */{file.size_bytes}"
            return Json({"detail": f"{file.name} has {file.size_bytes} bytes"}, status_code=416, headers=headers)
        wanted = range(file.size_bytes) if asked is None else asked
        headers["Content-Length"] = str(len(wanted))
        if asked is not None:
            headers["Content-Range"] = f"bytes {wanted.start}-{wanted.stop - 1}/{file.size_bytes}"
        status = 200 if asked is None else 206
        if request.method == "HEAD":
            return Response(status_code=status, headers=headers, media_type=_MEDIA_TYPE)
        pieces = await self._exports.read(file, wanted.start, len(wanted))
        return StreamingResponse(pieces, status, headers, _MEDIA_TYPE)


def parse_range(header: str | None, size_bytes: int) -> range | None:
    """The bytes that a Range header asks for (RFC 9110, section 14): none of them if the file has not got them.

    None, for the whole file, without a header, for other units and for several ranges: servers may ignore those.
    """
    match = _RANGE.fullmatch(header or "")
    if match is None or not any(match.groups()):
        return None
    first, last = (int(text) if text else None for text in match.groups())
    if first is None:
        return range(max(size_bytes - (last or 0), 0), size_bytes)
    if last is not None and last < first:
        return None
    return range(first, size_bytes if last is None else min(last + 1, size_bytes))


def _path(link: Link) -> str:
    query = urlencode({"expires": link.expires_at, "signature": link.signature})
    return f"{quote(link.run)}/{quote(link.name)}/{quote(link.file)}?{query}"
