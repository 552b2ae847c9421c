"""The sources of images and their tensors: a cache of vision tensors, a cache of uploaded images, and fetching by URL.

Images are fetched only from hosts that the operator has listed, and never from unlisted private addresses.
"""

import asyncio
import hashlib
import ipaddress
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urljoin

import httpx
from cachetools import LRUCache

from fovea.runtime.tasks import SingleFlight
from fovea.wire.conventions import MAX_IMAGE_BYTES
from fovea.wire.errors import FeatureEvicted, InvalidInput, NotFound, ResourceExhausted
from fovea.wire.tensors import FeatureTensors, size_bytes
from fovea_renderer import renderer_metrics
from fovea_renderer.image_header import InvalidChunk
from fovea_renderer.worker_pool import ProcessedImage

_SHA256 = re.compile(r"[0-9a-f]{64}")
REDIRECT_LIMIT = 3
_MOST_PORT = 65535
_PORTS = {"http": 80, "https": 443}

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# The only part of IPv6 from which IANA assigns addresses to hosts. It excludes ::/96 (IPv4-compatible), 64:ff9b::/96
# and 64:ff9b:1::/48 (NAT64), fc00::/7 (local), fe80::/10 (link), fec0::/10 (site, RFC 3879) and ff00::/8 (multicast).
_UNICAST = ipaddress.IPv6Network("2000::/3")
# Networks that are not public. Python's `is_global` differs by release and is true for some of them. An address of a
# tunnel (Teredo, 6to4) contains an IPv4 address; a gateway on the way would connect to it even if it is private.
_SPECIAL = tuple(
    ipaddress.ip_network(text)
    for text in (
        "192.0.0.0/24",  # protocols, RFC 6890
        "192.88.99.0/24",  # relays of 6to4, RFC 7526
        "2001::/23",  # protocols, Teredo (2001::/32) among them, RFC 2928
        "2001:db8::/32",  # documentation, RFC 3849
        "2002::/16",  # 6to4, RFC 3056
        "3fff::/20",  # documentation, RFC 9637
    )
)


@dataclass(frozen=True)
class Feature:
    """The vision tensors of one image. `digest` identifies its bytes and the processor's fingerprint."""

    digest: str
    tensors: FeatureTensors
    tensors_sha256: str
    size_bytes: int


class FeatureCache:
    """Caches up to `limit_bytes` of vision tensors and evicts the least recently used. Each image is processed once."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._held: LRUCache[str, Feature] = LRUCache(limit_bytes, getsizeof=lambda feature: feature.size_bytes)
        self._making: SingleFlight[str, Feature] = SingleFlight(abandon=True)

    def held(self, digest: str) -> Feature:
        """Returns the feature of a digest. Raises FeatureEvicted if it is not cached."""
        feature = self._held.get(digest)
        if feature is None:
            raise FeatureEvicted(f"the tensors of image {digest} are not held; render the image again", digest=digest)
        return feature

    async def get(self, digest: str, process: Callable[[], Awaitable[ProcessedImage]]) -> Feature:
        """Returns the feature of a digest; calls `process` unless it is cached or already being processed.

        All concurrent callers get the same result or the same error. The work is cancelled once all callers are.

        Raises ResourceExhausted if the tensors are larger than the cache.
        """
        feature = self._held.get(digest)
        if feature is not None:
            renderer_metrics.FEATURE_LOOKUPS.labels("hit").inc()
            return feature
        renderer_metrics.FEATURE_LOOKUPS.labels("joined" if digest in self._making else "miss").inc()
        return await self._making.run(digest, lambda: self._make(digest, process))

    async def _make(self, digest: str, process: Callable[[], Awaitable[ProcessedImage]]) -> Feature:
        processed = await process()
        feature = Feature(digest, processed.tensors, processed.tensors_sha256, size_bytes(processed.tensors))
        if feature.size_bytes > self.limit_bytes:
            raise ResourceExhausted(
                f"the tensors of one image have {feature.size_bytes} bytes, above the {self.limit_bytes} bytes"
                " that the renderer may hold (setting feature_cache_bytes)"
            )
        self._held[digest] = feature
        renderer_metrics.IMAGES_RENDERED.inc()
        renderer_metrics.IMAGE_SECONDS.observe(processed.seconds)
        renderer_metrics.FEATURE_BYTES.inc(feature.size_bytes)
        renderer_metrics.HELD_BYTES.labels("features").set(self._held.currsize)
        return feature


class ImageCache:
    """Caches up to `limit_bytes` of encoded images by SHA-256 and evicts the least recently used."""

    def __init__(self, limit_bytes: int) -> None:
        self._held: LRUCache[str, bytes] = LRUCache(limit_bytes, getsizeof=len)

    def held(self, sha256: str, field: str) -> bytes:
        """Returns the bytes of an image. Raises NotFound, with `field`, if it is not cached."""
        data = self._held.get(sha256)
        renderer_metrics.IMAGE_LOOKUPS.labels("miss" if data is None else "hit").inc()
        if data is None:
            raise NotFound(f"{field}: no image with SHA-256 {sha256} is held; send it by PutImage", field=field)
        return data

    async def put(self, pieces: AsyncIterator[tuple[str, bytes]]) -> int:
        """Stores an image that arrives in pieces of (sha256, bytes); returns its size in bytes.

        The first piece contains the SHA-256 of the image. Raises InvalidInput if the SHA-256 is malformed or does not
        match the bytes, or if the image is empty or too large. Raises ResourceExhausted if it is larger than the cache.
        """
        expected, data = "", bytearray()
        async for sha256, piece in pieces:
            if not expected:
                if not _SHA256.fullmatch(sha256):
                    raise InvalidInput(
                        f"sha256 {sha256[:80]!r} is not 64 lower-case hexadecimal digits", field="sha256"
                    )
                expected = sha256
            data += piece
            if len(data) > MAX_IMAGE_BYTES:
                raise InvalidInput(
                    f"the image has more than {MAX_IMAGE_BYTES} bytes, the limit; send a smaller one", field="data"
                )
        if not data:
            raise InvalidInput("the image has no bytes", field="data")
        found = (await asyncio.to_thread(hashlib.sha256, data)).hexdigest()
        if found != expected:
            raise InvalidInput(f"sha256 is {expected} but the bytes have {found}; send them again", field="sha256")
        if len(data) > self._held.maxsize:
            raise ResourceExhausted(
                f"the image has {len(data)} bytes, above the {self._held.maxsize} bytes that the renderer may hold"
                " (setting image_store_bytes)"
            )
        self._held[expected] = bytes(data)
        renderer_metrics.HELD_BYTES.labels("images").set(self._held.currsize)
        return len(data)


def parse_address(text: str) -> Address | None:
    """Returns the address in a text, or None. An IPv4 address mapped into IPv6 (::ffff:1.2.3.4) becomes IPv4."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return (address.ipv4_mapped or address) if isinstance(address, ipaddress.IPv6Address) else address


def parse_network(text: str) -> Network | None:
    """Returns the network in a text, or None. A single address becomes a network of one address."""
    try:
        return ipaddress.ip_network(text)
    except ValueError:
        return None


def is_public(address: Address) -> bool:
    """Returns True if an address that `parse_address` returned belongs to a single host on the public internet."""
    if address.is_multicast or not address.is_global or any(address in network for network in _SPECIAL):
        return False
    return isinstance(address, ipaddress.IPv4Address) or address in _UNICAST


class ImageFetcher:
    """Fetches images over http and https.

    It resolves the host itself, checks the address, and connects to that same address, so that the name cannot resolve
    to another address between check and use. It ignores proxies from the environment, because a proxy would resolve the
    name again.

    Args:
        hosts: Allowed host names, addresses, and networks such as 10.1.0.0/16. An address that is not public (private,
            loopback, link-local) must itself be listed, even if a listed name resolves to it.
        timeout_s: Seconds to fetch one image, redirects included.
    """

    def __init__(self, hosts: Sequence[str], timeout_s: float) -> None:
        networks = {host: parse_network(host) for host in hosts}
        self._networks = [network for network in networks.values() if network is not None]
        self._names = {host.lower().rstrip(".") for host, network in networks.items() if network is None}
        self._timeout_s = timeout_s
        self._client = httpx.AsyncClient(trust_env=False, follow_redirects=False, timeout=timeout_s)

    async def close(self) -> None:
        """Closes all connections."""
        await self._client.aclose()

    async def fetch(self, uri: str) -> bytes:
        """Returns the bytes at a URL. Raises InvalidChunk for any failure; the message names the URL or its host."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._follow(uri)
        except TimeoutError:
            raise InvalidChunk("uri", f"fetching {uri} took more than {self._timeout_s:.0f} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            raise InvalidChunk("uri", f"fetching {uri} failed: {error or type(error).__name__}") from error

    async def _follow(self, uri: str) -> bytes:
        url = httpx.URL(uri)
        host = url.host
        for _ in range(REDIRECT_LIMIT + 1):
            if url.host != host:
                raise InvalidChunk("uri", f"{uri} leads to another host, {url.host}; name the final address")
            answer = await self._get(url)
            if isinstance(answer, bytes):
                return answer
            url = httpx.URL(urljoin(str(url), answer))
        raise InvalidChunk("uri", f"{uri} redirects more than {REDIRECT_LIMIT} times")

    async def _get(self, url: httpx.URL) -> bytes | str:
        """Returns the body at `url` as bytes, or the URL to which it redirects as a string."""
        address = await self._allowed_address(url)
        pinned = url.copy_with(host=str(address))
        headers = {"host": url.netloc.decode("ascii"), "accept": "image/png, image/jpeg", "accept-encoding": "identity"}
        extensions = {"sni_hostname": url.host}
        async with self._client.stream("GET", pinned, headers=headers, extensions=extensions) as response:
            if response.has_redirect_location:
                return response.headers["location"]
            if response.status_code != httpx.codes.OK:
                raise InvalidChunk("uri", f"{url} answers {response.status_code}; the renderer needs 200")
            if response.headers.get("content-encoding", "identity") != "identity":
                raise InvalidChunk("uri", f"{url} answers with content-encoding {response.headers['content-encoding']}")
            body = bytearray()
            async for piece in response.aiter_raw():
                body += piece
                if len(body) > MAX_IMAGE_BYTES:
                    raise InvalidChunk("uri", f"{url} has more than {MAX_IMAGE_BYTES} bytes, the limit of an image")
            return bytes(body)

    async def _allowed_address(self, url: httpx.URL) -> Address:
        if url.scheme not in ("http", "https"):
            raise InvalidChunk("uri", f"{url} is not an http or https address; send the image's bytes instead")
        if url.userinfo:
            raise InvalidChunk("uri", f"the address of host {url.host} holds a user name or password; leave them out")
        port = _PORTS[url.scheme] if url.port is None else url.port
        if not 0 < port <= _MOST_PORT:
            raise InvalidChunk("uri", f"{url} has port {port}; it must be 1 .. {_MOST_PORT}")
        literal = parse_address(url.host)
        listed = self._is_listed(literal) if literal else url.host.lower().rstrip(".") in self._names
        if not listed:
            raise InvalidChunk(
                "uri",
                f"host {url.host!r} is not in the renderer's setting image_hosts; list it there or send the bytes",
            )
        if literal:
            return literal
        for address in await _resolve(url.host, port):
            if is_public(address) or self._is_listed(address):
                return address
        raise InvalidChunk(
            "uri",
            f"host {url.host!r} has no public address; list its address too in the renderer's setting image_hosts",
        )

    def _is_listed(self, address: Address) -> bool:
        return any(address in network for network in self._networks)


async def _resolve(host: str, port: int) -> list[Address]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = (parse_address(str(entry[4][0])) for entry in found)
    return [address for address in addresses if address is not None]
