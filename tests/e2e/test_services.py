"""What an operator expects of every service: health, reflection, metrics, and a log one can read."""

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

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
        listed = next(reflection.ServerReflectionInfo(iter([asked]), timeout=5)).list_services_response.service
        assert SERVICES[name] in {service.name for service in listed}


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
