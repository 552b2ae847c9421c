"""Images by URL: allowed hosts only, over real sockets."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from fovea.wire.conventions import MAX_IMAGE_BYTES
from fovea_renderer.image_header import InvalidChunk
from fovea_renderer.image_sources import ImageFetcher

BODY = b"image bytes" * 1000
ANSWERS = {
    "/image.png": b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY),
    "/moved": b"HTTP/1.1 302 Found\r\nLocation: /image.png\r\nContent-Length: 0\r\n\r\n",
    "/away": b"HTTP/1.1 302 Found\r\nLocation: http://localhost:1/image.png\r\nContent-Length: 0\r\n\r\n",
    "/loop": b"HTTP/1.1 302 Found\r\nLocation: /loop\r\nContent-Length: 0\r\n\r\n",
    "/nowhere": b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\n\r\n",
    "/bracket": b"HTTP/1.1 302 Found\r\nLocation: http://[/\r\nContent-Length: 0\r\n\r\n",
    "/port": b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:99999/\r\nContent-Length: 0\r\n\r\n",
    "/missing": b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
    "/zipped": b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 0\r\n\r\n",
    "/short": b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nnot all",
    "/rubbish": b"this is not HTTP\r\n\r\n",
    "/large": b"HTTP/1.1 200 OK\r\n\r\n" + bytes(MAX_IMAGE_BYTES + 1),
    "/slow": b"",
}


@pytest.fixture(scope="module")
async def server() -> AsyncIterator[int]:
    """Runs an HTTP server on 127.0.0.1 with the responses in `ANSWERS`; yields its port."""
    unanswered = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        path = request.split()[1].decode()
        writer.write(ANSWERS[path])
        unanswered.append(writer) if path == "/slow" else writer.close()

    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    yield listening.sockets[0].getsockname()[1]
    for writer in unanswered:
        writer.close()
    listening.close()


@pytest.fixture
async def fetcher() -> AsyncIterator[ImageFetcher]:
    fetcher = ImageFetcher(["127.0.0.0/8", "localhost"], timeout_s=2.0)
    yield fetcher
    await fetcher.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize("path", ["/image.png", "/moved"])
async def test_fetches_from_a_listed_host(fetcher: ImageFetcher, server: int, host: str, path: str) -> None:
    assert await fetcher.fetch(f"http://{host}:{server}{path}") == BODY


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/away", "leads to another host, localhost"),
        ("/loop", "redirects more than 3 times"),
        ("/nowhere", "answers 302; the renderer needs 200"),
        ("/bracket", "failed"),
        ("/port", "has port 99999; it must be 1 .. 65535"),
        ("/missing", "answers 404"),
        ("/zipped", "content-encoding gzip"),
        ("/short", "failed"),
        ("/rubbish", "failed"),
        ("/large", f"more than {MAX_IMAGE_BYTES} bytes"),
        ("/slow", "took more than 2 s"),
    ],
)
async def test_says_what_went_wrong_and_goes_on(fetcher: ImageFetcher, server: int, path: str, message: str) -> None:
    with pytest.raises(InvalidChunk, match=message):
        await fetcher.fetch(f"http://127.0.0.1:{server}{path}")
    assert await fetcher.fetch(f"http://127.0.0.1:{server}/image.png") == BODY


@pytest.mark.parametrize(
    ("hosts", "uri", "message"),
    [
        ([], "http://images.example/a.png", "host 'images.example' is not in the renderer's setting image_hosts"),
        (["images.example"], "http://evil.example/a.png", "host 'evil.example' is not in"),
        (["images.example"], "http://images.example.evil.example/", "is not in"),
        ([], "http://127.0.0.1/a.png", "host '127.0.0.1' is not in"),
        (["10.0.0.0/8"], "http://169.254.169.254/latest", "host '169.254.169.254' is not in"),
        ([], "http://[::1]/a.png", "host '::1' is not in"),
        (["localhost"], "http://localhost/a.png", "'localhost' has no public address; list its address"),
        (["localhost"], "ftp://localhost/a.png", "not an http or https address"),
        (["localhost"], "file:///etc/passwd", "not an http or https address"),
        (["localhost"], "http://user:secret@localhost/", "holds a user name"),
        (["localhost"], "http://local\x00host/", "failed"),
        (["localhost"], "http://localhost:99999/a.png", "has port 99999; it must be 1 .. 65535"),
        (["127.0.0.1"], "http://127.0.0.1:99999/a.png", "has port 99999"),
        (["127.0.0.1"], "http://127.0.0.1:999999999999999999999/a.png", "has port 9+; it must be 1 .. 65535"),
        (["127.0.0.1"], "http://127.0.0.1:-1/a.png", "has port -1; it must be"),
        (["127.0.0.1"], "http://127.0.0.1:0/a.png", "has port 0; it must be 1 .. 65535"),
        (["::/0"], "http://[::ffff:127.0.0.1]/a.png", "is not in"),
        (["localhost"], "http://[", "is not in"),
        (["localhost"], "", "not an http or https address"),
        (["no-such-host.invalid"], "http://no-such-host.invalid/", "failed"),
    ],
)
async def test_refuses_what_is_not_listed(hosts: list[str], uri: str, message: str) -> None:
    fetcher = ImageFetcher(hosts, timeout_s=5.0)
    with pytest.raises(InvalidChunk, match=message) as refused:
        await fetcher.fetch(uri)
    assert refused.value.cause == "uri"
    assert "secret" not in refused.value.message
    await fetcher.close()
