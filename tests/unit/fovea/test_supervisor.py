"""What `fovea up` runs: ports, devices and arguments of the four services."""

import pathlib
from dataclasses import replace

from fovea.cli.supervisor import UpOptions, base_url, service_specs

OPTIONS = UpOptions(
    model="m", model_name="name", host="0.0.0.0", port=8000, grpc_port=8001, ranks=2, state_dir=pathlib.Path("s")
)


def test_four_services_on_different_ports() -> None:
    specs = {spec.name: spec for spec in service_specs(OPTIONS)}
    assert list(specs) == ["renderer", "sampler", "trainer", "gateway"]
    assert specs["gateway"].address == "127.0.0.1:8001"
    ports = [spec.address for spec in specs.values()] + [spec.metrics_port for spec in specs.values()]
    assert len(set(ports)) == 8
    for name in ("sampler", "trainer", "gateway"):
        arguments = specs[name].arguments
        assert arguments[arguments.index("--renderer") + 1] == specs["renderer"].address
    assert base_url(OPTIONS) == "http://127.0.0.1:8000"


def test_devices_are_visible_to_their_service_alone() -> None:
    specs = {s.name: s for s in service_specs(replace(OPTIONS, trainer_gpus=("0", "1"), sampler_gpus=("2",)))}
    assert specs["trainer"].environment["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert specs["sampler"].environment["CUDA_VISIBLE_DEVICES"] == "2"
    assert "CUDA_VISIBLE_DEVICES" not in specs["gateway"].environment
    assert "--transfer" not in specs["sampler"].arguments


def test_a_shared_gpu_takes_weights_over_gloo() -> None:
    specs = {s.name: s for s in service_specs(replace(OPTIONS, trainer_gpus=("0",), sampler_gpus=("0",)))}
    assert specs["sampler"].arguments[-2:] == ("--transfer", "gloo")
