"""The settings choose a discovery; an invalid one is refused with an error that names it."""

import re

import pytest

from fovea.wire.errors import InvalidInput
from fovea_gateway.fronts.components import choose_discovery
from fovea_gateway.replicas.discovery import StaticDiscovery


async def test_static_addresses_are_told_once() -> None:
    discovery = choose_discovery("sampler", ["a:1", "b:2", "a:1"], in_kubernetes=False)
    assert isinstance(discovery, StaticDiscovery)
    assert [addresses async for addresses in discovery.watch()] == [{"a:1", "b:2"}]


@pytest.mark.parametrize("in_kubernetes", [False, True])
async def test_no_address_means_no_replicas(in_kubernetes: bool) -> None:
    """`--samplers 0` gives no address."""
    assert [addresses async for addresses in choose_discovery("sampler", [], in_kubernetes=in_kubernetes).watch()] == [
        set()
    ]


@pytest.mark.parametrize(
    ("addresses", "words"),
    [
        (["a:1", "b:1", "c:1"], "--discovery kubernetes needs exactly one --sampler service:port, not 3"),
        (["a"], "address is 'a'; write it as name:port"),
    ],
)
def test_wrong_settings_are_refused(addresses: list[str], words: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(words)):
        choose_discovery("sampler", addresses, in_kubernetes=True, namespace="ml")
