"""Addresses to which a name may resolve."""

import pytest

from fovea_renderer.image_sources import is_public, parse_address

PUBLIC = ["8.8.8.8", "1.1.1.1", "93.184.216.34", "2606:4700::1111", "2a00:1450:4001::1", "::ffff:8.8.8.8"]
NOT_PUBLIC = {
    "this host": ["0.0.0.0", "127.0.0.1", "::", "::1", "::ffff:127.0.0.1", "::ffff:0:0"],
    "private": ["10.0.0.1", "172.16.0.1", "192.168.1.1", "100.64.0.1", "fc00::1", "fd12::1", "::ffff:10.0.0.1"],
    "link": ["169.254.169.254", "fe80::1", "fe80::1%eth0", "::ffff:169.254.169.254"],
    "site": ["fec0::1", "feff:ffff::1"],
    "multicast": ["224.0.0.1", "239.255.255.250", "ff02::1", "ff0e::1", "ff3e::8000:1"],
    "broadcast and reserved": ["255.255.255.255", "240.0.0.1", "192.0.0.8", "198.18.0.1", "100::1", "5f00::1"],
    "documentation": ["192.0.2.1", "198.51.100.1", "203.0.113.1", "2001:db8::1", "3fff::1"],
    "IPv4-compatible": ["::7f00:1", "::169.254.169.254", "::8.8.8.8"],
    "IPv4-translated": ["::ffff:0:10.0.0.1", "::ffff:0:8.8.8.8"],
    "NAT64": ["64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b::8.8.8.8", "64:ff9b:1::10.0.0.1", "64:ff9b:1:2::1"],
    "6to4": ["2002:7f00:1::1", "2002:a9fe:a9fe::1", "2002:808:808::1", "192.88.99.1"],
    "Teredo": ["2001::1", "2001:0:7f00:1::", "2001:0:4136:e378:8000:63bf:3fff:fdd2"],
}


@pytest.mark.parametrize("text", PUBLIC)
def test_hosts_of_the_internet_are_public(text: str) -> None:
    address = parse_address(text)
    assert address is not None
    assert is_public(address)


@pytest.mark.parametrize(("what", "text"), [(what, text) for what, texts in NOT_PUBLIC.items() for text in texts])
def test_nothing_else_is(what: str, text: str) -> None:
    address = parse_address(text)
    assert address is not None
    assert not is_public(address), what
