"""The ports, devices and arguments of the four services of `fovea up`."""

import asyncio
import io
import json
import os
import pathlib
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from dataclasses import replace

import pytest
from rich.console import Console

from fovea.cli import service as service_module
from fovea.cli import supervisor as supervisor_module
from fovea.cli.service import ServiceSpec
from fovea.cli.service_specs import NO_GPU, ServedModel, Setting, UpOptions, base_url, service_specs
from fovea.cli.state_folder import StateFolder
from fovea.cli.supervisor import Supervisor
from fovea.runtime.credentials import SECRET_VARIABLE
from fovea.runtime.hosts import free_ports

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


def test_temporary_files_have_short_paths_however_deep_the_state_folder_is() -> None:
    """vLLM's sockets add 37 characters, and a socket's path may have at most 107."""
    deep, deeper = (replace(OPTIONS, state_dir=pathlib.Path("/", *depth * ["deep"])) for depth in (30, 31))
    folders = [spec.temporary_dir for options in (deep, deep, deeper) for spec in service_specs(options)]
    assert len(set(folders)) == 8, "the paths of one state folder must not change"
    assert max(map(len, folders)) <= len(tempfile.gettempdir()) + 24


def test_unnamed_snapshots_and_parked_sessions_fit_on_the_disk(tmp_path: pathlib.Path) -> None:
    """A sparse file of 2 TiB lets the folder use more than the limit of 64 GiB allows, however full its disk is."""
    variables = ["FOVEA_GATEWAY_UNNAMED_BYTES", "FOVEA_GATEWAY_PARKED_BYTES"]

    def limits(*settings: Setting) -> list[str | None]:
        options = replace(OPTIONS, state_dir=tmp_path / "fovea", settings=settings)
        environment = next(spec.environment for spec in service_specs(options) if spec.name == "gateway")
        return [environment.get(variable) for variable in variables]

    free = shutil.disk_usage(tmp_path).free
    for limit in limits():
        assert limit is not None
        assert int(limit) == pytest.approx(min(64 * 2**30, free // 4), rel=0.1)
    (tmp_path / "fovea").mkdir()
    with (tmp_path / "fovea" / "state").open("wb") as file:
        file.truncate(2**41)
    assert limits() == 2 * [str(64 * 2**30)]
    assert limits(Setting("gateway", "unnamed_bytes", "5"))[1] == str(64 * 2**30)


def test_further_models_have_services_of_their_own_behind_one_gateway() -> None:
    teacher = ServedModel("org/teacher 2", "t", is_trained=False, sampler_gpus=("3",))
    other = ServedModel("other", "o", is_trained=True, trainer_gpus=("1",), sampler_gpus=("1",))
    specs = {spec.name: spec for spec in service_specs(replace(OPTIONS, further_models=(teacher, other)))}
    assert list(specs) == [
        "renderer", "sampler", "trainer", "renderer-org_teacher_2", "sampler-org_teacher_2",
        "renderer-other", "sampler-other", "trainer-other", "gateway",
    ]  # fmt: skip
    ports = [spec.address for spec in specs.values()] + [spec.metrics_port for spec in specs.values()]
    assert len(set(ports)) == 18
    arguments = specs["gateway"].arguments
    told = json.loads(arguments[arguments.index("--further-models") + 1])
    assert [(each["model_name"], each["model"]) for each in told] == [("org/teacher 2", "t"), ("other", "o")]
    assert (told[0]["trainer"], told[1]["trainer"]) == ([], [specs["trainer-other"].address])
    assert told[0]["sampler"] == [specs["sampler-org_teacher_2"].address]
    assert specs["sampler-org_teacher_2"].environment["CUDA_VISIBLE_DEVICES"] == "3"
    assert specs["sampler-other"].starts_after == "trainer-other"
    kept = [specs[name].arguments for name in ("trainer", "trainer-other")]
    assert [each[each.index("--recovery") + 1] for each in kept] == ["s/recovery", "s/recovery-other"]
    assert [specs[name].kind for name in ("trainer-other", "gateway")] == ["trainer", "gateway"]


def test_devices_are_visible_to_their_service_alone() -> None:
    specs = {s.name: s for s in service_specs(replace(OPTIONS, trainer_gpus=("0", "1"), sampler_gpus=("2",)))}
    assert specs["trainer"].environment["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert specs["sampler"].environment["CUDA_VISIBLE_DEVICES"] == "2"
    assert "CUDA_VISIBLE_DEVICES" not in specs["gateway"].environment
    assert "--transfer" not in specs["sampler"].arguments


def test_several_trainers_divide_the_gpus_and_share_the_recovery_data() -> None:
    options = replace(OPTIONS, trainer_gpus=("0", "1", "2", "3"), sampler_gpus=("4",), trainer_count=2)
    specs = {s.name: s for s in service_specs(options)}
    assert [specs[name].environment["CUDA_VISIBLE_DEVICES"] for name in ("trainer", "trainer2")] == ["0,1", "2,3"]
    first, second = (specs[name].arguments for name in ("trainer", "trainer2"))
    assert first[first.index("--recovery") + 1] == second[second.index("--recovery") + 1]
    gateway = specs["gateway"].arguments
    told = json.loads(gateway[gateway.index("--trainer") + 1])
    assert told == [specs["trainer"].address, specs["trainer2"].address]
    assert specs["trainer2"].kind == "trainer"


@pytest.mark.parametrize(
    ("trainer", "sampler", "count", "transfer"),
    [
        ("0", "0", 1, "cuda_ipc"),
        ("0", "0", 2, "cuda_ipc"),
        ("01", "0", 1, "gloo"),
        ("01", "1", 1, None),
        ("0", "1", 2, "gloo"),
    ],
)
def test_a_shared_gpu_takes_weights_by_other_ways_than_nccl(
    trainer: str, sampler: str, count: int, transfer: str | None
) -> None:
    options = replace(OPTIONS, trainer_gpus=tuple(trainer), sampler_gpus=tuple(sampler), sampler_count=count)
    arguments = next(spec.arguments for spec in service_specs(options) if spec.name == "sampler")
    assert dict(zip(arguments[::2], arguments[1::2], strict=True)).get("--transfer") == transfer


def test_the_samplers_other_gpus_do_not_share() -> None:
    specs = {s.name: s for s in service_specs(replace(OPTIONS, trainer_gpus=("0",), sampler_gpus=("0", "1")))}
    assert "gloo" in specs["sampler"].arguments


def test_the_samplers_gpus_share_its_model() -> None:
    specs = {s.name: s for s in service_specs(replace(OPTIONS, trainer_gpus=("0",), sampler_gpus=("1", "2")))}
    assert specs["sampler"].arguments[-2:] == ("--tensor-parallel", "2")


def test_several_samplers_have_equal_parts_of_the_devices() -> None:
    options = replace(OPTIONS, trainer_gpus=("0",), sampler_gpus=("1", "2", "3", "4"), sampler_count=2)
    specs = {spec.name: spec for spec in service_specs(options)}
    assert list(specs) == ["renderer", "sampler", "sampler2", "trainer", "gateway"]
    assert specs["sampler2"].kind == "sampler"
    seen = [specs[name].environment["CUDA_VISIBLE_DEVICES"] for name in ("sampler", "sampler2")]
    assert seen == ["1,2", "3,4"]
    arguments = specs["gateway"].arguments
    told = json.loads(arguments[arguments.index("--sampler") + 1])
    assert told == [specs["sampler"].address, specs["sampler2"].address]
    assert len({spec.temporary_dir for spec in specs.values()}) == 5


def test_samplers_that_share_a_device_measure_it_one_after_the_other() -> None:
    options = replace(OPTIONS, trainer_gpus=("0",), sampler_gpus=("0",), sampler_count=3)
    after = {spec.name: spec.starts_after for spec in service_specs(options) if spec.kind == "sampler"}
    assert after == {"sampler": "trainer", "sampler2": "sampler", "sampler3": "sampler2"}


def test_services_with_a_shared_base_order_their_starts_themselves() -> None:
    for gpus in ((), ("0",)):
        options = replace(OPTIONS, trainer_gpus=gpus, sampler_gpus=gpus, ranks=1, shares_base=True)
        specs = {spec.name: spec for spec in service_specs(options)}
        folder = pathlib.Path(specs["sampler"].temporary_dir).parent
        sockets = {name: specs[name].arguments[-2:] for name in ("sampler", "trainer")}
        assert sockets["sampler"] == sockets["trainer"] == ("--shared-base", f"{folder}.base")
        assert specs["sampler"].starts_after == ""


def test_no_sampler_and_no_gpu() -> None:
    specs = {spec.name: spec for spec in service_specs(replace(OPTIONS, sampler_count=0, trainer_gpus=NO_GPU))}
    assert list(specs) == ["renderer", "trainer", "gateway"]
    arguments = specs["gateway"].arguments
    assert arguments[arguments.index("--sampler") + 1] == "[]"
    assert specs["trainer"].environment["CUDA_VISIBLE_DEVICES"] == ""


def test_settings_reach_their_kind_and_stand_above_suggestions(monkeypatch: pytest.MonkeyPatch) -> None:
    options = replace(
        OPTIONS,
        settings=(Setting("sampler", "max_loras", "16"), Setting("gateway", "checkpoint_dir", "/kept")),
        suggestions=(
            Setting("sampler", "gpu_memory_fraction", "0.3"),
            Setting("trainer", "memory_limit_mib", "9"),
        ),
    )
    specs = {spec.name: spec for spec in service_specs(options)}
    assert specs["sampler"].environment["FOVEA_SAMPLER_MAX_LORAS"] == "16"
    assert specs["sampler"].environment["FOVEA_SAMPLER_GPU_MEMORY_FRACTION"] == "0.3"
    assert specs["trainer"].environment["FOVEA_TRAINER_MEMORY_LIMIT_MIB"] == "9"
    assert "FOVEA_SAMPLER_MAX_LORAS" not in specs["gateway"].environment
    assert specs["trainer"].arguments[specs["trainer"].arguments.index("--checkpoints") + 1] == "/kept"
    monkeypatch.setenv("FOVEA_SAMPLER_GPU_MEMORY_FRACTION", "0.7")
    trainer = next(spec for spec in service_specs(options) if spec.name == "trainer")
    assert "FOVEA_TRAINER_MEMORY_LIMIT_MIB" not in trainer.environment, "the shares must make up the whole"


def test_keys_reach_the_gateway_alone_and_no_argument(tmp_path: pathlib.Path) -> None:
    options = replace(OPTIONS, api_keys=("tml-secret", "alice=tml-other"), api_key_file=tmp_path / "keys")
    specs = {spec.name: spec for spec in service_specs(options)}
    assert specs["gateway"].environment["FOVEA_GATEWAY_API_KEY"] == '["tml-secret", "alice=tml-other"]'
    for name, spec in specs.items():
        assert not any("tml-" in argument for argument in spec.arguments)
        assert name == "gateway" or not any("tml-" in value for value in spec.environment.values())
    assert specs["gateway"].arguments[-2:] == ("--api-key-file", str(tmp_path / "keys"))


def test_all_services_share_a_secret_that_no_argument_shows() -> None:
    first, again = ({spec.environment[SECRET_VARIABLE] for spec in service_specs(OPTIONS)} for _ in range(2))
    assert len(first) == len(again) == 1
    assert first.isdisjoint(again)
    for spec in service_specs(OPTIONS):
        assert spec.environment[SECRET_VARIABLE] not in " ".join(spec.arguments)


def test_a_key_of_ones_own_is_not_shown_and_the_state_is_its_users_alone(tmp_path: pathlib.Path) -> None:
    shown = io.StringIO()
    for keys in (), ("tml-secret",):
        options = replace(OPTIONS, host="127.0.0.1", state_dir=tmp_path, api_keys=keys)
        supervisor = Supervisor(options, Console(file=shown, width=200))
        supervisor._show_table(1.0)
        supervisor._write_state(1.0)
    assert "TINKER_API_KEY=tml-local" in shown.getvalue()
    assert "Live page: http://127.0.0.1:" in shown.getvalue()
    assert "TINKER_API_KEY=YOUR_KEY" in shown.getvalue()
    assert "tml-secret" not in shown.getvalue() + (tmp_path / "up.json").read_text()
    assert stat.filemode((tmp_path / "up.json").stat().st_mode) == "-rw-------"


def test_the_line_for_clients_names_the_hosts_without_proxy_where_there_is_one(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "localhost,127.0.0.1")
    shown = io.StringIO()
    Supervisor(replace(OPTIONS, state_dir=tmp_path), Console(file=shown, width=200))._show_table(1.0)
    assert "no_proxy=localhost,127.0.0.1\n" in shown.getvalue()


async def test_a_second_one_in_the_same_folder_is_refused_and_takes_nothing(tmp_path: pathlib.Path) -> None:
    options = replace(OPTIONS, state_dir=tmp_path)
    first = StateFolder(tmp_path)
    first.hold("http://127.0.0.1:8000")
    first.write({"pid": 1})
    shown = io.StringIO()
    assert await Supervisor(options, Console(file=shown, width=300)).run() == 1
    (line,) = shown.getvalue().splitlines()
    assert f"another `fovea up` runs in {tmp_path}: process {os.getpid()}, http://127.0.0.1:8000." in line
    assert json.loads((tmp_path / "up.json").read_text()) == {"pid": 1}
    first.release()
    assert not (tmp_path / "up.json").exists()
    second = StateFolder(tmp_path)
    second.hold("http://127.0.0.1:9000")
    second.release()


def supervisor_of(
    specs: list[ServiceSpec], folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Supervisor, io.StringIO]:
    """Returns a supervisor of these services, which are named gateway and trainer, and its output."""
    shown = io.StringIO()
    monkeypatch.setattr(supervisor_module, "service_specs", lambda options: specs)
    monkeypatch.setattr(supervisor_module, "STOP_ORDER", ("gateway", "trainer"))
    return Supervisor(replace(OPTIONS, state_dir=folder), Console(file=shown, width=300)), shown


async def run_until(words: str, supervisor: Supervisor, shown: io.StringIO, patience_s: float) -> "asyncio.Task[int]":
    """Starts the supervisor; waits until it has printed the words."""
    running = asyncio.create_task(supervisor.run())
    await shows(words, running, shown, patience_s)
    return running


async def shows(words: str, running: "asyncio.Task[int]", shown: io.StringIO, patience_s: float) -> None:
    """Waits until a running supervisor has printed the words."""
    async with asyncio.timeout(patience_s):
        while words not in shown.getvalue():
            assert not running.done(), shown.getvalue()
            await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_a_part_that_keeps_dying_ends_nobody_else(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others keep running. Each time the next action is printed, and once it serves again, its return."""
    monkeypatch.setattr(service_module, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(service_module, "LONGEST_PAUSE_S", 0.04)
    count = tmp_path / "count"
    count.write_text("0")
    steady, flapping = (
        ServiceSpec(
            name,
            ("-c", program, str(port), str(count)),
            f"127.0.0.1:{port}",
            "fovea.Part",
            0,
            {SECRET_VARIABLE: 32 * "s"},
        )
        for name, program, port in (("trainer", SERVING, free_ports(1)[0]), ("gateway", FLAPPING, free_ports(1)[0]))
    )
    supervisor, shown = supervisor_of([steady, flapping], tmp_path, monkeypatch)
    running = await run_until("gateway is back", supervisor, shown, 120)
    lines = shown.getvalue()
    ends = re.findall(
        r"gateway ended with code 3 \(count \d\); restarting it in (\S+) s, the other services keep running", lines
    )
    assert len(ends) == 8, "the last lines of its first life are gRPC's"
    assert all(0.03 < float(pause) <= 0.04 for pause in ends[1:])
    assert "trainer ended" not in lines
    assert lines.count("trainer is ready") == lines.count("gateway is ready") == lines.count("gateway is back") == 1
    shown_by_status = await asyncio.to_thread(status, tmp_path)
    assert re.search(r"trainer │ .* │ 0 +│ serving", shown_by_status)
    assert re.search(r"gateway │ .* │ 9 +│ serving", shown_by_status)
    assert "gateway last ended with code 3 (count 9)\n" in shown_by_status
    os.kill(os.getpid(), signal.SIGTERM)
    assert await running == 0


async def test_what_cannot_start_ends_all_at_once_with_its_cause(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (port,) = free_ports(1)
    program = "raise OSError('port 1 is taken')"
    specs = [
        ServiceSpec(
            "trainer", ("-c", SERVING, str(port)), f"127.0.0.1:{port}", "fovea.Part", 0, {SECRET_VARIABLE: 32 * "s"}
        ),
        ServiceSpec("gateway", ("-c", program), "127.0.0.1:1", "fovea.Part", 0, {}),
    ]
    supervisor, shown = supervisor_of(specs, tmp_path, monkeypatch)
    async with asyncio.timeout(30):
        assert await supervisor.run() == 1
    (line,) = [line for line in shown.getvalue().splitlines() if "ended with" in line]
    assert "gateway ended with code 1 (OSError: port 1 is taken) before Fovea was ready" in line


@pytest.mark.parametrize("kills", [2, 3])
async def test_what_is_killed_while_it_starts_is_started_again_twice(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, kills: int
) -> None:
    monkeypatch.setattr(service_module, "FIRST_PAUSE_S", 0.01)
    count = tmp_path / "count"
    count.write_text("0")
    (port,) = free_ports(1)
    program = KILLED.format(kills=kills) + SERVING
    specs = [
        ServiceSpec(
            "gateway",
            ("-c", program, str(port), str(count)),
            f"127.0.0.1:{port}",
            "fovea.Part",
            0,
            {SECRET_VARIABLE: 32 * "s"},
        )
    ]
    supervisor, shown = supervisor_of(specs, tmp_path, monkeypatch)
    again = "gateway ended with SIGKILL; restarting it in"
    if kills == 2:
        running = await run_until("gateway is ready", supervisor, shown, 60)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await running == 0
    else:
        async with asyncio.timeout(60):
            assert await supervisor.run() == 1
        assert "gateway ended with SIGKILL before Fovea was ready" in shown.getvalue()
    assert shown.getvalue().count(again) == 2


WAITING = """
import logging, socket, sys
from fovea.runtime.processes import wait_for_turn
logging.basicConfig(level="INFO")
wait_for_turn(logging.getLogger("late"), "the trainer has started")
socket.create_connection(("127.0.0.1", int(sys.argv[2]))).close()
"""


async def test_a_service_imports_while_it_waits_for_another_and_then_finds_it_serving(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example a sampler on the trainer's device, which uses the remaining memory. The first service starts only
    once the second one runs, so a second one that is started afterwards fails this test.
    """
    first, second = free_ports(2)
    mark = tmp_path / "second runs"
    late = f"import pathlib, time\nwhile not pathlib.Path({str(mark)!r}).exists(): time.sleep(0.1)\n" + SERVING
    finds = f"import pathlib\npathlib.Path({str(mark)!r}).touch()\n" + WAITING + SERVING
    specs = [
        ServiceSpec(
            name, ("-c", program, str(port), str(first)), f"127.0.0.1:{port}", "fovea.Part", 0,
            {SECRET_VARIABLE: 32 * "s"}, starts_after=after,
        )
        for name, program, port, after in (("trainer", late, first, ""), ("gateway", finds, second, "trainer"))
    ]  # fmt: skip
    supervisor, shown = supervisor_of(specs, tmp_path, monkeypatch)
    running = await run_until("gateway is ready", supervisor, shown, 60)
    assert "waiting until the trainer has started" in shown.getvalue()
    pid = supervisor._services["gateway"].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await shows("gateway is back", running, shown, 60)
    assert shown.getvalue().count("waiting until") == 1, "a service that restarts waits for no other"
    os.kill(os.getpid(), signal.SIGTERM)
    assert await running == 0


PRINTING = """
import pathlib, sys
from rich.console import Console
from fovea.cli.service_specs import UpOptions
from fovea.cli.supervisor import Supervisor
options = UpOptions("m", "name", "127.0.0.1", 1, 2, 1, pathlib.Path(sys.argv[1]))
supervisor = Supervisor(options, Console())
for _ in range(3):
    supervisor._print("fovea", "x" * 100_000)
sys.exit(7)
"""


def test_a_log_that_nobody_reads_ends_nobody(tmp_path: pathlib.Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    result = subprocess.run([sys.executable, "-c", PRINTING, str(tmp_path)], stdout=writing, check=False)
    os.close(writing)
    assert result.returncode == 7


def status(folder: pathlib.Path) -> str:
    """Returns the output of `fovea status`, which must find all services serving."""
    command = [sys.executable, "-m", "fovea.cli.main", "status", "--state-dir", str(folder)]
    wide = os.environ | {"COLUMNS": "200"}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=wide).stdout


SERVING = """
import asyncio, pathlib, signal, sys
from fovea.runtime.server import ServiceServer
from fovea.runtime.settings import ServiceSettings

async def main():
    server = ServiceServer(ServiceSettings(port=int(sys.argv[1]), drain_s=0), ["fovea.Part"])
    await server.start()
    await server.set_serving(True)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.request_stop)
    if DIES:
        while not pathlib.Path(sys.argv[2]).with_name("up.json").exists():
            await asyncio.sleep(0.05)
        sys.exit(3)
    await server.run_until_stopped()

asyncio.run(main())
"""
FLAPPING = (
    """
import pathlib, sys
count = pathlib.Path(sys.argv[2])
starts = int(count.read_text()) + 1
count.write_text(str(starts))
print("count", starts)
if 1 < starts < 10:
    sys.exit(3)
DIES = starts == 1
"""
    + SERVING
)
KILLED = """
import os, pathlib, signal, sys
count = pathlib.Path(sys.argv[2])
starts = int(count.read_text()) + 1
count.write_text(str(starts))
if starts <= {kills}:
    os.kill(os.getpid(), signal.SIGKILL)
"""
SERVING = "DIES = False" + SERVING
