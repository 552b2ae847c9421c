"""What `fovea up` runs: ports, devices and arguments of the four services."""

import io
import pathlib
import stat
from dataclasses import replace

from rich.console import Console

from fovea.cli.supervisor import Supervisor, UpOptions, base_url, service_specs
from fovea.runtime.secret import VARIABLE

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


def test_keys_reach_the_gateway_alone_and_no_argument(tmp_path: pathlib.Path) -> None:
    options = replace(OPTIONS, api_keys=("tml-secret", "alice=tml-other"), api_key_file=tmp_path / "keys")
    specs = {spec.name: spec for spec in service_specs(options)}
    assert specs["gateway"].environment["FOVEA_GATEWAY_API_KEY"] == '["tml-secret", "alice=tml-other"]'
    for name, spec in specs.items():
        assert not any("tml-" in argument for argument in spec.arguments)
        assert name == "gateway" or not any("tml-" in value for value in spec.environment.values())
    assert specs["gateway"].arguments[-2:] == ("--api-key-file", str(tmp_path / "keys"))


def test_all_services_share_a_secret_that_no_argument_shows() -> None:
    first, again = ({spec.environment[VARIABLE] for spec in service_specs(OPTIONS)} for _ in range(2))
    assert len(first) == len(again) == 1
    assert first.isdisjoint(again)
    for spec in service_specs(OPTIONS):
        assert spec.environment[VARIABLE] not in " ".join(spec.arguments)


def test_a_key_of_ones_own_is_not_shown_and_the_state_is_its_users_alone(tmp_path: pathlib.Path) -> None:
    shown = io.StringIO()
    for keys in (), ("tml-secret",):
        options = replace(OPTIONS, host="127.0.0.1", state_dir=tmp_path, api_keys=keys)
        supervisor = Supervisor(options, Console(file=shown, width=200))
        supervisor._show_table(1.0)
        supervisor._write_state(1.0)
    assert "TINKER_API_KEY=tml-local" in shown.getvalue()
    assert "TINKER_API_KEY=YOUR_KEY" in shown.getvalue()
    assert "tml-secret" not in shown.getvalue() + (tmp_path / "up.json").read_text()
    assert stat.filemode((tmp_path / "up.json").stat().st_mode) == "-rw-------"
