"""Where the replicas of a service are. Everything else watches here and takes whatever changes."""

from collections.abc import Sequence
from typing import Literal

from fovea.wire.errors import InvalidInput
from fovea_gateway.discovery.discovery import Discovery, DnsDiscovery, StaticDiscovery

Kind = Literal["static", "dns", "kubernetes"]


def choose(kind: Kind, service: str, addresses: Sequence[str], namespace: str = "") -> Discovery:
    """The discovery of one service.

    Args:
        service: Name of the setting that `addresses` come from.
        addresses: host:port of each replica for static, one name:port for the others; none is nobody, for ever.
        namespace: Of the service in Kubernetes; empty is the pod's own.

    Raises InvalidInput naming the setting that is wrong.
    """
    if kind == "static" or not addresses:
        return StaticDiscovery(addresses)
    if len(addresses) != 1:
        raise InvalidInput(f"--discovery {kind} takes one --{service} name:port, not {len(addresses)}", field=service)
    if kind == "dns":
        return DnsDiscovery(addresses[0])
    # Half a second of imports that nobody needs outside a cluster.
    from fovea_gateway.discovery.kubernetes import KubernetesDiscovery

    return KubernetesDiscovery(addresses[0], namespace)
