"""Client of the gateway's gRPC API: sessions, models, training commands as futures, streamed samples.

`check_server` checks the base URL of its REST API, and an API key.
"""

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

from fovea.api.v1 import admin_pb2, admin_pb2_grpc, gateway_pb2, gateway_pb2_grpc, trainer_pb2, weights_pb2
from fovea.client.channel import ServiceClient
from fovea.client.trainer import ForwardBackwardResult
from fovea.runtime.hosts import host_of
from fovea.wire.conventions import GATEWAY_SERVICE, is_token
from fovea.wire.errors import FailedPrecondition, Internal

SUBMIT_TIMEOUT_S = 120.0
WAIT_S = 30.0

_API = "/api/v1"
_ANSWER_S, _GUESS_S = 10.0, 2.0
_REST_PORT = 8000
_NOT_FOUND = (404, 405)
_REFUSED = (401, 403)
_NOT_SERVED = (*_NOT_FOUND, 502, 503, 504)
"""Statuses of another program, of another path, or of a proxy without a server behind it."""


class GatewayClient(ServiceClient):
    """Typed calls to a gateway. Submissions carry a `seq_id`, so all of them are safe to repeat.

    Args:
        address: host:port of the gateway's gRPC server.
        api_key: An API key that the gateway accepts.
    """

    def __init__(self, address: str, api_key: str) -> None:
        submits = ("CreateModel", "OptimStep", "SaveState", "LoadState", "SaveForSampler")
        names = [*(f"Submit{name}" for name in submits), "GetCapabilities", "GetModel", "Heartbeat", "CreateCustomLoss"]
        super().__init__(
            address, [(GATEWAY_SERVICE, name) for name in names], (("x-api-key", api_key),), internal=False
        )
        self._stub = gateway_pb2_grpc.GatewayServiceStub(self.channel)
        self._admin = admin_pb2_grpc.AdminServiceStub(self.channel)

    async def capabilities(self, timeout_s: float = 10.0) -> list[gateway_pb2.ServedModel]:
        """Returns the served models."""
        response = await self._unary(self._stub.GetCapabilities, gateway_pb2.GetCapabilitiesRequest(), timeout_s)
        return list(response.models)

    async def create_session(self, request_id: str = "", user_metadata: Mapping[str, str] | None = None) -> str:
        """Opens a session; returns its id. A repeat with the same `request_id` returns the same session."""
        request = gateway_pb2.CreateSessionRequest(request_id=request_id, user_metadata=user_metadata)
        response = await self._unary(self._stub.CreateSession, request, SUBMIT_TIMEOUT_S)
        return str(response.session_id)

    async def heartbeat(self, session_id: str) -> None:
        """Keeps a session alive. Raises SessionEnded if it has ended."""
        await self._unary(self._stub.Heartbeat, gateway_pb2.HeartbeatRequest(session_id=session_id), SUBMIT_TIMEOUT_S)

    async def finish_session(self, session_id: str) -> None:
        """Ends a session and frees its models. With an admin's key, the session may belong to any owner."""
        request = gateway_pb2.FinishSessionRequest(session_id=session_id)
        await self._unary(self._stub.FinishSession, request, SUBMIT_TIMEOUT_S)

    async def parked_sessions(self, owner: str = "") -> list[admin_pb2.ParkedSession]:
        """Returns parked sessions: the caller's own or, with an admin's key, those of `owner` (`*` for all owners)."""
        request = admin_pb2.ListParkedSessionsRequest(owner=owner)
        return list((await self._unary(self._admin.ListParkedSessions, request, SUBMIT_TIMEOUT_S)).sessions)

    async def create_model(
        self, session_id: str, model_seq_id: int, base_model: str, lora: weights_pb2.LoraConfig
    ) -> str:
        """Creates a model, waits for it and returns its id. Rank 0 trains all parameters."""
        request = gateway_pb2.SubmitCreateModelRequest(
            session_id=session_id, model_seq_id=model_seq_id, base_model=base_model, lora=lora
        )
        future = await self._unary(self._stub.SubmitCreateModel, request, SUBMIT_TIMEOUT_S)
        record = await self.wait(future.future_id)
        return str(record.model_created.model_id)

    async def upload_image(self, data: bytes) -> str:
        """Uploads one encoded image and returns its SHA-256 for use in an ImageReference."""
        return await self._send_image(self._stub.UploadImage, gateway_pb2.UploadImageRequest, data, SUBMIT_TIMEOUT_S)

    async def forward_backward(
        self, header: gateway_pb2.SubmitForwardBackwardHeader, datums: Iterable[gateway_pb2.InputDatum]
    ) -> ForwardBackwardResult:
        """Computes a loss and its gradients, and waits for the result."""

        async def records() -> AsyncIterator[gateway_pb2.SubmitForwardBackwardRequest]:
            yield gateway_pb2.SubmitForwardBackwardRequest(header=header)
            for datum in datums:
                yield gateway_pb2.SubmitForwardBackwardRequest(datum=datum)

        future = await self._unary(self._stub.SubmitForwardBackward, records(), SUBMIT_TIMEOUT_S)
        outputs: list[trainer_pb2.DatumOutput] = []
        async for record in self.result(future.future_id):
            if record.WhichOneof("record") == "output":
                outputs.append(record.output)
            else:
                return ForwardBackwardResult(outputs, dict(record.metrics.values))
        raise Internal(f"the result of {future.future_id} ends without metrics")

    async def create_custom_loss(self, session_id: str, custom_loss_seq_id: int, loss: trainer_pb2.CustomLoss) -> str:
        """Stores a traced loss for the session's models and returns its id for use as `custom_loss_id`."""
        request = gateway_pb2.CreateCustomLossRequest(
            session_id=session_id, custom_loss_seq_id=custom_loss_seq_id, loss=loss
        )
        response = await self._unary(self._stub.CreateCustomLoss, request, SUBMIT_TIMEOUT_S)
        return str(response.custom_loss_id)

    async def optim_step(self, model_id: str, seq_id: int, adam: trainer_pb2.AdamParams) -> dict[str, float]:
        """Performs an optimizer step, waits for it and returns its metrics."""
        request = gateway_pb2.SubmitOptimStepRequest(model_id=model_id, seq_id=seq_id, adam=adam)
        future = await self._unary(self._stub.SubmitOptimStep, request, SUBMIT_TIMEOUT_S)
        return dict((await self.wait(future.future_id)).metrics.values)

    async def save_for_sampler(
        self, model_id: str, seq_id: int, name: str = "", *, inflight: bool = False
    ) -> gateway_pb2.SnapshotSaved:
        """Saves weights for sampling, and waits until they are saved.

        Without a name, also opens a sampling session on them. With `inflight`, later calls move that session to the new
        weights, even while its samples run.
        """
        request = gateway_pb2.SubmitSaveForSamplerRequest(
            model_id=model_id, seq_id=seq_id, name=name, inflight=inflight
        )
        future = await self._unary(self._stub.SubmitSaveForSampler, request, SUBMIT_TIMEOUT_S)
        return (await self.wait(future.future_id)).snapshot_saved

    async def create_sampling_session(
        self, session_id: str, sampling_session_seq_id: int, base_model: str = "", model_path: str = ""
    ) -> str:
        """Opens a sampling session on a base model or a saved path, and returns its id."""
        weights: dict[str, Any] = {"model_path": model_path} if model_path else {"base_model": base_model}
        request = gateway_pb2.CreateSamplingSessionRequest(
            session_id=session_id, sampling_session_seq_id=sampling_session_seq_id, **weights
        )
        response = await self._unary(self._stub.CreateSamplingSession, request, SUBMIT_TIMEOUT_S)
        return str(response.sampling_session_id)

    def sample(
        self, request: gateway_pb2.SampleTokensRequest, timeout_s: float = 3600.0
    ) -> AsyncIterator[gateway_pb2.SampleTokensResponse]:
        """Streams sampling events. Closing the iterator early cancels the request in the engine."""
        return self._stream(self._stub.SampleTokens, request, timeout_s)

    async def wait(self, future_id: str) -> gateway_pb2.WaitFutureResponse:
        """Waits for a result with one record and returns the record. Raises the error of the command."""
        async for record in self.result(future_id):
            return record
        raise Internal(f"the result of {future_id} is empty")

    async def result(self, future_id: str) -> AsyncIterator[gateway_pb2.WaitFutureResponse]:
        """Streams the records of a result, polling until it is available. Raises the error of the command."""
        request = gateway_pb2.WaitFutureRequest(future_id=future_id, timeout_s=WAIT_S)
        pending = True
        while pending:
            pending = False
            async for record in self._stream(self._stub.WaitFuture, request, WAIT_S + 30.0):
                if record.WhichOneof("record") == "pending":
                    pending = True
                else:
                    yield record


class NotConnected(FailedPrecondition):
    """The error of a wrong address or API key. The message says what to change."""


class _Unredirected(urllib.request.HTTPRedirectHandler):
    """Raises HTTPError at a redirect: urllib would send the API key to any other host."""

    def redirect_request(self, *_: Any) -> None:
        """Follows nothing."""


_OPENER = urllib.request.build_opener(_Unredirected)


def check_server(base_url: str, api_key: str | None = None) -> None:
    """Checks in seconds that a Tinker server answers at a base URL. The SDK would retry for minutes without a word.

    Args:
        base_url: The address.
        api_key: The API key to check too, which may be empty; None checks none. The SDK exchanges tokens itself.

    Raises:
        NotConnected: No Tinker server answers there, or it refuses the key. The message says what to change.
    """
    url = base_url.rstrip("/")
    if host_of(url) == "" or not url.startswith(("http://", "https://")):
        meant = (base_url.partition("://")[2] if "://" in base_url else base_url).strip("/")
        raise NotConnected(
            f"base_url is {base_url!r}, which is no http:// or https:// address: write"
            f" http://{meant if host_of(meant) else f'127.0.0.1:{_REST_PORT}'}",
            field="base_url",
        )
    seen = _unserved(url, _ANSWER_S)
    if not seen:
        if api_key is not None and not is_token(api_key):
            _check_key(url, api_key)
        return
    better = "" if "timed out" in seen else next((one for one in _variants(url) if not _unserved(one, _GUESS_S)), "")
    if better:
        fix = f"; one responds at {better}: use that address"
    elif "redirects" in seen:
        fix = ": give that address"
    elif "CERTIFICATE_VERIFY" in seen:
        fix = ": set SSL_CERT_FILE to the certificate of the authority that signed the server's"
    else:
        fix = ": start one with `fovea up`, or give the address of a running one"
    raise NotConnected(
        f"no server responds at {url} ({seen}){fix} (base_url, --base-url or TINKER_BASE_URL)", field="base_url"
    )


def _check_key(url: str, api_key: str) -> None:
    """Raises NotConnected if the server at a base URL refuses an API key. Other errors are left to the next request."""
    if not api_key:
        raise NotConnected(
            "no API key is given: set TINKER_API_KEY (or api_key, --api-key); `fovea up` prints a key, and `fovea keys"
            " create --owner NAME` makes one. People who sign in set TINKER_CREDENTIAL_CMD",
            field="api_key",
        )
    request = urllib.request.Request(f"{url}{_API}/get_server_capabilities", headers={"X-API-Key": api_key})
    try:
        with _OPENER.open(request, timeout=_ANSWER_S):
            return
    except urllib.error.HTTPError as error:
        with error:
            if where := _redirect(error):
                raise NotConnected(
                    f"the address {url} redirects to {where}: give that address", field="base_url"
                ) from None
            if error.code not in _REFUSED:
                return
            said = _detail(error.read()) or f"it answers {error.code}"
    except (OSError, http.client.HTTPException, ValueError):
        return
    raise NotConnected(
        f"the server at {url} refuses the API key (TINKER_API_KEY, api_key or --api-key): {said}", field="api_key"
    )


def _redirect(error: urllib.error.HTTPError) -> str:
    """Returns the address to which an answer redirects, without the path of the API; empty if it does not redirect."""
    return str(error.headers.get("Location", "")).partition(_API)[0] if 300 <= error.code < 400 else ""


def _detail(body: bytes) -> str:
    """Returns the error in a server's answer; empty if there is none."""
    try:
        return str(json.loads(body)["detail"])
    except (ValueError, KeyError, TypeError):
        return ""


def _variants(url: str) -> list[str]:
    """Returns addresses that were probably meant: without the path, with the other scheme, with the REST port."""
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    found = [
        f"{scheme}://{authority}{path}"
        for authority in (parts.netloc, f"{host}:{_REST_PORT}")
        for scheme in (parts.scheme, "http" if parts.scheme == "https" else "https")
        for path in (parts.path, parts.path.removesuffix("/v1").removesuffix("/api"), "")
    ]
    return list(dict.fromkeys(found))[1:]


def _unserved(url: str, timeout_s: float) -> str:
    """Returns the reason why no Tinker server is at a base URL; empty if one answers, even with a refusal."""
    status = 0
    for path in ("healthz", "get_server_capabilities"):  # some servers have no health check
        try:
            with _OPENER.open(f"{url}{_API}/{path}", timeout=timeout_s):
                return ""
        except urllib.error.HTTPError as error:
            error.close()
            if where := _redirect(error):
                return f"the address redirects to {where}"
            status = error.code
        except http.client.HTTPException:
            return "the port does not speak HTTP/1.1; a gRPC port does not"
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            return str(reason) or type(reason).__name__
        if status not in _NOT_FOUND:
            break
    return f"it answers {status}, so it is no Tinker server or none is behind it" if status in _NOT_SERVED else ""
