"""Addresses of the network: which of them lead to one host of the public internet."""

import ipaddress

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# All that IANA has given out of IPv6 to hosts. Outside are ::/96 (IPv4-compatible), 64:ff9b::/96 and 64:ff9b:1::/48
# (NAT64), fc00::/7 (local), fe80::/10 (link), fec0::/10 (site, RFC 3879) and ff00::/8 (multicast).
_UNICAST = ipaddress.IPv6Network("2000::/3")
# Python's tables differ by release, and call some of these global. Behind the tunnels stands an address of IPv4 that a
# gateway on the way would dial, however private it is.
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
    """An address, that of IPv4 in place of its form in IPv6 (::ffff:1.2.3.4); None if the text is none."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return (address.ipv4_mapped or address) if isinstance(address, ipaddress.IPv6Address) else address


def parse_network(text: str) -> Network | None:
    """A network, or an address as one of its own; None if the text is neither."""
    try:
        return ipaddress.ip_network(text)
    except ValueError:
        return None


def is_public(address: Address) -> bool:
    """Whether an address, as `parse_address` gives it, is of one host of the public internet."""
    if address.is_multicast or not address.is_global or any(address in network for network in _SPECIAL):
        return False
    return isinstance(address, ipaddress.IPv4Address) or address in _UNICAST
