"""Fetches images by URL, only from hosts that the operator has listed and never from unlisted private addresses."""

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from urllib.parse import urljoin

import httpx

from fovea.wire.conventions import MAX_IMAGE_BYTES
from fovea_services.renderer.chunk_errors import InvalidChunk

REDIRECT_LIMIT = 3
_MOST_PORT = 65535
_PORTS = {"http": 80, "https": 443}

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# The only part of IPv6 from which IANA assigns addresses to hosts. Outside are ::/96 (IPv4-compatible), 64:ff9b::/96
# and 64:ff9b:1::/48 (NAT64), fc00::/7 (local), fe80::/10 (link), fec0::/10 (site, RFC 3879) and ff00::/8 (multicast).
_UNICAST = ipaddress.IPv6Network("2000::/3")
# Python's `is_global` differs by release and is true for some of these networks. Tunnel addresses embed an IPv4
# address, to which a gateway on the way would connect even if it is private.
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
    """Returns True if an address, from `parse_address`, belongs to a single host on the public internet."""
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
            loopback, link-local) must be listed even if a listed name resolves to it.
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
        """Returns the bytes at a URL. Raises InvalidChunk, naming the host or the setting, for any failure."""
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
        port = url.port or _PORTS[url.scheme]
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
