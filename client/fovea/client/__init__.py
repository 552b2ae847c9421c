"""Asynchronous typed clients of every service, with deadlines. They raise the errors that the servers raised."""

from fovea.client.gateway import GatewayClient
from fovea.client.inference import FeatureFetcher, RendererClient, SamplerClient
from fovea.client.trainer import ForwardBackwardResult, TrainerClient

__all__ = [
    "FeatureFetcher",
    "ForwardBackwardResult",
    "GatewayClient",
    "RendererClient",
    "SamplerClient",
    "TrainerClient",
]
