"""Operator's view of every service: health, reflection, metrics, and a readable log."""

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from fovea.api.v1 import renderer_pb2, renderer_pb2_grpc, sampler_pb2, sampler_pb2_grpc, trainer_pb2, trainer_pb2_grpc
from fovea.runtime.credentials import SECRET_KEY
from tests.e2e.stack import Stack

SERVICES = {
    "renderer": "fovea.api.v1.RendererService",
    "sampler": "fovea.api.v1.SamplerService",
    "trainer": "fovea.api.v1.TrainerService",
    "gateway": "fovea.api.v1.GatewayService",
}


@pytest.mark.parametrize("name", SERVICES)
def test_health_and_reflection_answer(stack: Stack, name: str) -> None:
    with grpc.insecure_channel(stack.address(name)) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", SERVICES[name]):
            answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        known = ((SECRET_KEY, stack.secret),)
        answers = reflection.ServerReflectionInfo(iter([asked]), timeout=5, metadata=known)
        listed = next(answers).list_services_response.service
        assert SERVICES[name] in {service.name for service in listed}


@pytest.mark.parametrize("metadata", [(), ((SECRET_KEY, "a guess of the secret"),)])
def test_strangers_are_refused(stack: Stack, metadata: tuple[tuple[str, str], ...]) -> None:
    """Callers that reach a service's port without its secret, such as another user of this machine, are refused."""
    calls = (
        ("renderer", renderer_pb2_grpc.RendererServiceStub, "GetRendererInfo", renderer_pb2.GetRendererInfoRequest()),
        ("sampler", sampler_pb2_grpc.SamplerServiceStub, "GetSamplerInfo", sampler_pb2.GetSamplerInfoRequest()),
        ("trainer", trainer_pb2_grpc.TrainerServiceStub, "GetTrainerInfo", trainer_pb2.GetTrainerInfoRequest()),
        ("trainer", reflection_pb2_grpc.ServerReflectionStub, "ServerReflectionInfo", None),
    )
    for name, stub, method, request in calls:
        with grpc.insecure_channel(stack.address(name)) as channel:
            call = getattr(stub(channel), method)
            with pytest.raises(grpc.RpcError, match="FOVEA_SERVICE_SECRET") as refused:
                next(call(iter([]), metadata=metadata)) if request is None else call(request, metadata=metadata)
            assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(
    ("name", "series"),
    [
        ("renderer", "fovea_renderer_"),
        ("sampler", "vllm:generation_tokens_total"),
        ("sampler", "fovea_sampler_"),
        ("trainer", "fovea_trainer_"),
        ("gateway", "fovea_gateway_"),
    ],
)
def test_metrics_answer(stack: Stack, name: str, series: str) -> None:
    answer = httpx.get(stack.state["services"][name]["metrics"], timeout=10)
    assert answer.status_code == 200
    assert series in answer.text


def test_services_are_ready_within_90_s(stack: Stack) -> None:
    assert stack.state["ready_s"] <= 90


def test_the_log_names_every_service(stack: Stack) -> None:
    lines = stack.log.read_text().splitlines()
    for name in SERVICES:
        assert any(line.lstrip().startswith(f"{name} │") for line in lines), name


def test_the_launcher_of_ranks_has_one_thread(stack: Stack) -> None:
    """It forks the ranks after all imports. A lock held by another thread at that moment would stay locked in the
    ranks.
    """
    launcher = stack.rank(-1)
    assert launcher is not None
    assert launcher.num_threads() == 1
