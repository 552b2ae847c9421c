"""Discovery of the replicas of one service: at fixed addresses, or in a Kubernetes service.

All other code watches the result and follows its changes. Kubernetes' client is imported late: that takes half a second
and is needed only in a cluster. EndpointSlices are listed once and then watched from the list's version:
https://kubernetes.io/docs/reference/using-api/api-concepts/#efficient-detection-of-changes. The stream is read here,
because the client library's Watch restarts silently on an expired version and hides bookmarks.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fovea.runtime.tasks import Backoff
from fovea.wire.errors import InvalidInput

if TYPE_CHECKING:
    import aiohttp
    from kubernetes.aio import client

logger = logging.getLogger(__name__)

_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_WATCH_S = 60
"""Seconds that a watch lasts. A connection that died silently is noticed shortly after that."""
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0

Addresses = frozenset[str]
"""host:port of each replica that accepts requests; [host]:port for IPv6."""


class Discovery(Protocol):
    """The source of one service's addresses."""

    def watch(self) -> AsyncGenerator[Addresses, None]:
        """Yields all addresses as soon as they are known, and again whenever they change.

        After a failure the source is queried again with growing pauses; meanwhile the last yielded set remains valid.
        The generator ends only if the set can no longer change. A replica that is missing from a later set is leaving:
        it finishes its current requests and receives no new ones.
        """
        ...


class StaticDiscovery:
    """Addresses that never change."""

    def __init__(self, addresses: Iterable[str]) -> None:
        self._addresses = frozenset(addresses)

    async def watch(self) -> AsyncGenerator[Addresses, None]:
        yield self._addresses


def split_address(address: str, field: str) -> tuple[str, str]:
    """Returns host and port of `host:port`. Raises InvalidInput that names `field`."""
    host, _, port = address.rpartition(":")
    if not host or not port:
        raise InvalidInput(f"{field} is {address!r}; write it as name:port", field=field)
    return host.strip("[]"), port


def join_address(host: str, port: int | str) -> str:
    """Returns host:port in the format of gRPC."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class KubernetesDiscovery:
    """Discovery of replicas in the EndpointSlices of one service.

    Args:
        address: service:port; the port is its name in the service, or the number that replicas listen on.
        namespace: The namespace of the service; if empty, the one that this pod runs in.
        configuration: The API server and the credentials; by default from KUBECONFIG, else from the pod's service
            account.

    Raises InvalidInput if there is no namespace, or neither KUBECONFIG nor a service account.
    """

    def __init__(self, address: str, namespace: str = "", configuration: client.Configuration | None = None) -> None:
        self._service, self._port = split_address(address, "address")
        self._namespace = namespace or _own_namespace()
        self._kubeconfig = os.environ.get("KUBECONFIG", "")
        self._configuration = configuration
        if configuration is None and not self._kubeconfig:
            self._configuration = _service_account()
        self._problem = ""

    async def watch(self) -> AsyncGenerator[Addresses, None]:
        """Yields the addresses of ready endpoints whenever they change."""
        from kubernetes.aio import client
        from kubernetes.aio.config import load_kube_config

        known: Addresses | None = None
        if self._configuration is None:
            self._configuration = client.Configuration()
            await load_kube_config(self._kubeconfig, client_configuration=self._configuration)  # type: ignore[no-untyped-call]
        async with client.ApiClient(self._configuration) as api_client, aclosing(self._slices(api_client)) as changes:
            async for slices in changes:
                found = self._addresses(slices)
                if found != known:
                    known = found
                    yield found

    async def _slices(self, api_client: client.ApiClient) -> AsyncGenerator[list[dict[str, Any]], None]:
        """Yields all slices at first, and again whenever one changes."""
        import aiohttp
        from kubernetes.aio import client

        api = client.DiscoveryV1Api(api_client)
        by_name: dict[str, dict[str, Any]] = {}
        version = ""
        backoff = Backoff(first_s=_FIRST_PAUSE_S, longest_s=_LONGEST_PAUSE_S)
        while True:
            try:
                if not version:
                    by_name, version = await self._list(api)
                    yield list(by_name.values())
                async with aclosing(self._events(api, version)) as events:
                    async for kind, item in events:
                        backoff.reset()
                        version = item["metadata"]["resourceVersion"]
                        if kind != "BOOKMARK":
                            by_name.pop(item["metadata"]["name"], None)
                            if kind != "DELETED":
                                by_name[item["metadata"]["name"]] = item
                            yield list(by_name.values())
            except _Refused as error:
                # After any error the version is unusable. An expired version is normal and needs no report.
                is_expired, version = error.status == HTTPStatus.GONE and bool(version), ""
                if is_expired:
                    continue
                self._report(self._explain(error))
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
                self._report(f"{type(error).__name__}: {error}")
            else:
                self._problem = ""
                backoff.reset()
                continue
            await backoff.pause()

    async def _list(self, api: client.DiscoveryV1Api) -> tuple[dict[str, dict[str, Any]], str]:
        response = await self._get(api, 10.0)
        async with response:
            await _check(response)
            answer = await response.json()
        return {item["metadata"]["name"]: item for item in answer["items"]}, answer["metadata"]["resourceVersion"]

    async def _events(
        self, api: client.DiscoveryV1Api, version: str
    ) -> AsyncGenerator[tuple[str, dict[str, Any]], None]:
        """Yields (type, object) until the server ends the watch. Raises _Refused, or the errors of broken
        connections.
        """
        response = await self._get(
            api, _WATCH_S + 15.0, watch=True, resource_version=version, allow_watch_bookmarks=True,
            timeout_seconds=_WATCH_S,
        )  # fmt: skip
        async with response:
            await _check(response)
            async for line in response.content:
                event = json.loads(line)
                if event["type"] == "ERROR":
                    raise _Refused(event["object"].get("code", 0), event["object"].get("message", ""))
                yield event["type"], event["object"]

    async def _get(self, api: client.DiscoveryV1Api, timeout_s: float, **more: Any) -> aiohttp.ClientResponse:
        response: aiohttp.ClientResponse = await api.list_namespaced_endpoint_slice_without_preload_content(
            self._namespace, label_selector=f"kubernetes.io/service-name={self._service}", _request_timeout=timeout_s,
            **more,
        )  # fmt: skip
        return response

    def _addresses(self, slices: Iterable[dict[str, Any]]) -> Addresses:
        by_family: dict[str, set[str]] = {"IPv4": set(), "IPv6": set(), "FQDN": set()}
        for found in slices:
            port = self._port_in(found)
            if port is None:
                continue
            for endpoint in found.get("endpoints") or []:
                if _takes_requests(endpoint.get("conditions") or {}):
                    # Addresses of one endpoint are interchangeable, so the first is enough.
                    by_family[found["addressType"]].add(join_address(endpoint["addresses"][0], port))
        # A dual-stack pod is in two slices but must count once.
        return frozenset(by_family["IPv4"] or by_family["IPv6"] or by_family["FQDN"])

    def _port_in(self, found: dict[str, Any]) -> int | None:
        if self._port.isdecimal():
            return int(self._port)
        ports = {port.get("name", ""): port["port"] for port in found.get("ports") or []}
        if self._port not in ports and found.get("endpoints"):
            logger.warning("service %s has no port named %r; it has %s", self._service, self._port, sorted(ports))
        return ports.get(self._port)

    def _explain(self, error: _Refused) -> str:
        if error.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            return (
                f"{error}. The gateway's service account needs a Role in namespace {self._namespace} with apiGroups "
                '["discovery.k8s.io"], resources ["endpointslices"], verbs ["get", "list", "watch"]'
            )
        return str(error)

    def _report(self, problem: str) -> None:
        if problem != self._problem:
            logger.warning(
                "endpoints of service %s cannot be watched, so the known addresses remain in use: %s",
                self._service,
                problem,
            )
        self._problem = problem


class _Refused(Exception):
    """An error response from the API server."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status != HTTPStatus.OK:
        text = await response.text()
        try:
            text = json.loads(text)["message"]
        except (ValueError, KeyError, TypeError):
            text = text[:200]
        raise _Refused(response.status, text)


def _takes_requests(conditions: dict[str, Any]) -> bool:
    """Returns whether an endpoint is ready. Unknown counts as ready, as the API reference demands."""
    return conditions.get("ready") is not False and not conditions.get("terminating")


def _own_namespace() -> str:
    try:
        return _NAMESPACE_FILE.read_text().strip()
    except FileNotFoundError:
        raise InvalidInput(
            f"--kubernetes-namespace is empty and {_NAMESPACE_FILE} does not exist: set the namespace",
            field="kubernetes_namespace",
        ) from None


def _service_account() -> client.Configuration:
    from kubernetes.aio import client
    from kubernetes.aio.config import ConfigException, load_incluster_config

    configuration = client.Configuration()
    try:
        load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    except ConfigException as error:
        raise InvalidInput(
            f"--discovery kubernetes needs a pod with a service account, or KUBECONFIG: {error}", field="discovery"
        ) from error
    return configuration
