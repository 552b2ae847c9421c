"""A second sampler beside a running Fovea, and a gateway in front of both."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fovea.runtime.credentials import SECRET_VARIABLE
from fovea.runtime.hosts import free_ports
from tests.e2e.stack import API_KEY, Stack
from tests.service_process import ServiceProcess, service_process


@dataclass(frozen=True)
class TwoSamplers:
    """The addresses of both samplers' gateway, and the processes that tests may kill.

    Attributes:
        base_url: URL of the gateway in front of both samplers.
        metrics: URL of the second sampler's metrics.
    """

    base_url: str
    metrics: str
    second: ServiceProcess


@contextmanager
def running_beside(stack: Stack, folder: pathlib.Path) -> Iterator[TwoSamplers]:
    """Starts both on free ports, and stops them."""
    sampler, gateway, rest, *metrics = free_ports(5)
    to = "127.0.0.1:"
    model = ("--model", str(stack.model), "--renderer", stack.address("renderer"))
    with (
        service_process(
            folder / "sampler.log", "SamplerService", f"{to}{sampler}", "--port", str(sampler),
            "--metrics-port", str(metrics[0]), *model, environment={SECRET_VARIABLE: stack.secret},
        ) as second,
        service_process(
            folder / "gateway.log", "GatewayService", f"{to}{gateway}", "--grpc-port", str(gateway),
            "--port", str(rest), "--metrics-port", str(metrics[1]), "--model-name", stack.model_name,
            "--trainer", stack.address("trainer"), "--sampler", stack.address("sampler"),
            "--checkpoint-dir", str(stack.log.parent / "checkpoints/beside"),
            "--sampler", second.address, "--state-dir", str(folder), "--api-key", API_KEY, *model,
            environment={SECRET_VARIABLE: stack.secret},
        ) as front,
    ):  # fmt: skip
        second.wait_serving()
        front.wait_serving()
        yield TwoSamplers(f"http://{to}{rest}", f"http://{to}{metrics[0]}/metrics", second)
