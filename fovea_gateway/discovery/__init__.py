"""Discovery of a service's replicas. All other code watches the result and follows its changes."""

from collections.abc import Sequence
from typing import Literal

from fovea.wire.errors import InvalidInput
from fovea_gateway.discovery.discovery import Discovery, DnsDiscovery, StaticDiscovery

Kind = Literal["static", "dns", "kubernetes"]


def choose(kind: Kind, service: str, addresses: Sequence[str], namespace: str = "") -> Discovery:
    """Returns the discovery of one service.

    Args:
        service: Name of the setting that `addresses` come from.
        addresses: host:port of each replica for static, one name:port for the others. If empty, the service has no
            replicas.
        namespace: The Kubernetes namespace of the service; empty is the pod's own.

    Raises InvalidInput that names the wrong setting.
    """
    if kind == "static" or not addresses:
        return StaticDiscovery(addresses)
    if len(addresses) != 1:
        raise InvalidInput(
            f"--discovery {kind} needs exactly one --{service} name:port, not {len(addresses)}", field=service
        )
    if kind == "dns":
        return DnsDiscovery(addresses[0])
    # Imported here because it takes half a second and is needed only in a cluster.
    from fovea_gateway.discovery.kubernetes import KubernetesDiscovery

    return KubernetesDiscovery(addresses[0], namespace)
