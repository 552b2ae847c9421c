"""The settings choose a discovery, and a wrong one is refused by name."""

import re
from typing import get_args

import pytest

from fovea.wire.errors import InvalidInput
from fovea_gateway.discovery import Kind, choose
from fovea_gateway.discovery.discovery import DnsDiscovery, StaticDiscovery


async def test_static_addresses_are_told_once() -> None:
    discovery = choose("static", "sampler", ["a:1", "b:2", "a:1"])
    assert isinstance(discovery, StaticDiscovery)
    assert [addresses async for addresses in discovery.watch()] == [{"a:1", "b:2"}]


@pytest.mark.parametrize("kind", get_args(Kind))
async def test_no_address_is_nobody(kind: Kind) -> None:
    """As `--samplers 0` says it."""
    assert [addresses async for addresses in choose(kind, "sampler", []).watch()] == [set()]


@pytest.mark.parametrize(
    ("kind", "addresses", "words"),
    [
        ("dns", ["a:1", "b:1"], "--discovery dns needs exactly one --sampler name:port, not 2"),
        ("kubernetes", ["a:1", "b:1", "c:1"], "--discovery kubernetes needs exactly one --sampler name:port, not 3"),
        ("dns", ["a"], "address is 'a'; write it as name:port"),
        ("dns", ["a:grpc"], "port 'grpc' of 'a:grpc' must be a number"),
    ],
)
def test_wrong_settings_are_refused(kind: Kind, addresses: list[str], words: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(words)):
        choose(kind, "sampler", addresses)


def test_dns_takes_a_name_and_a_port() -> None:
    assert isinstance(choose("dns", "sampler", ["samplers:50052"]), DnsDiscovery)
