"""Messages of the `fovea` command for user errors."""

import io
import json
import os
import pathlib
import re
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.main import get_command
from typer.testing import CliRunner

import fovea
from deploy import cli_page
from fovea.cli import status_report
from fovea.cli.main import app
from fovea.cli.state_folder import (
    DEFAULT_STATE_DIR,
    StateFolder,
    folder_in_use,
    make_first_key,
    may_have_keys,
    name_database,
    print_table,
    running_folders,
    running_hint,
)
from tests.copies import Ended, run_copies


def test_a_model_that_is_not_there_is_named() -> None:
    result = CliRunner().invoke(app, ["up", "--model", "/nowhere/at/all"])
    assert result.exit_code == 2
    assert result.output.startswith("fovea up: --model: the folder /nowhere/at/all does not exist; ")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "kosmos-9"}, "model_type 'kosmos-9' is not supported; supported are "),
        (
            {"model_type": "qwen2_moe", "num_experts": 60},
            "model_type 'qwen2_moe', which has experts (num_experts), is not",
        ),
        (
            {"model_type": "ernie4_5_vl_moe", "vision_config": {}},
            "'ernie4_5_vl_moe' is a vision model that Fovea does not",
        ),
        ({"model_type": "internvl", "vision_config": {}, "text_config": {"num_experts": 128}}, "with experts"),
        ({"model_type": "llava", "vision_config": {"model_type": "clip_vision_model"}, "image_token_index": 1}, "clip"),
        ({"model_type": "llama", "auto_map": {"AutoModel": "model.Model"}}, "needs custom code (auto_map in"),
        ({"model_type": "qwen3", "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic' of qwen3"),
        ({"model_type": "qwen3_vl", "vision_config": {}}, "config.json has no image_token_id"),
    ],
)
def test_what_a_service_would_refuse_is_refused_in_one_line_before_anything_starts(
    config: dict[str, Any], reason: str, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = CliRunner().invoke(app, ["up", "--model", str(tmp_path), "--state-dir", str(tmp_path / "state")])
    assert result.exit_code == 2
    (line,) = result.output.splitlines()
    assert line.startswith(f"fovea up: --model: {tmp_path}")
    assert reason in line
    assert line.endswith(f"; to see which components work, run: fovea models check {tmp_path}")
    assert not (tmp_path / "state").exists()


def test_a_wrong_scope_of_sign_in_is_refused_before_anything_starts(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": 9}))
    (tmp_path / "model.safetensors").write_bytes(b"0")
    roles = '--set=gateway.oidc_roles={"ml-team": "trian"}'
    result = CliRunner().invoke(
        app, ["up", roles, "--port=0", "--model", str(tmp_path), "--state-dir", str(tmp_path / "state")]
    )
    assert result.exit_code == 2
    (line,) = result.output.splitlines()
    words = "the group 'ml-team' has the scope 'trian'; a scope is one of read, sample, train, admin"
    assert line == f"fovea up: --set gateway.oidc_roles: {words}"
    assert not (tmp_path / "state").exists()


def test_status_without_a_fovea(tmp_path: pathlib.Path) -> None:
    result = CliRunner().invoke(app, ["status", "--state-dir", str(tmp_path)])
    assert result.exit_code == 1
    assert "no Fovea runs" in " ".join(result.output.split())


def test_versions_and_wrong_uses_take_a_line_each() -> None:
    own, computing = CliRunner().invoke(app, ["--version"]).output.splitlines()
    assert own == fovea.__version__
    assert re.fullmatch(r"vllm(-cpu)? \d\S+, torch \d\S+, transformers \d\S+", computing)
    assert CliRunner().invoke(app, ["version"]).output == f"{own}\n{computing}\n"
    wrong = ((["nonsense"], "'nonsense'"), (["up", "--port", "x"], "--port"), (["restart"], "'service'"))
    ended = run_copies("fovea.cli.main", *(["fovea.cli.main", *arguments] for arguments, _ in wrong))
    for (_, words), done in zip(wrong, ended, strict=True):
        (line,) = done.stderr.splitlines()
        assert (done.returncode, done.stdout) == (2, "")
        assert words in line


def test_a_group_without_a_command_prints_its_help_alone() -> None:
    groups = [[], *([name] for name, command in get_command(app).commands.items() if hasattr(command, "commands"))]
    assert ["checkpoints"] in groups
    ended = run_copies("fovea.cli.main", *(["fovea.cli.main", *arguments] for arguments in groups))
    for done in ended:
        assert (done.returncode, done.stderr) == (2, "")
        assert "Usage: " in done.stdout


def test_the_reference_page_is_what_the_commands_say() -> None:
    assert cli_page.PAGE.read_text() == cli_page.page(), "run python -m deploy.cli_page"


HOLDER = """
import pathlib, signal, sys
from fovea.cli.state_folder import StateFolder
folder = StateFolder(pathlib.Path(sys.argv[1]))
folder.hold("http://127.0.0.1:1")
signal.signal(signal.SIGTERM, lambda *_: (folder.release(), sys.exit(7)))
print("up", flush=True)
signal.pause()
"""


def test_down_ends_who_holds_the_folder_and_waits(tmp_path: pathlib.Path) -> None:
    arguments = ["down", "--state-dir", str(tmp_path)]
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0
        assert result.output.startswith("stopped after ")
        assert process.wait(10.0) == 7
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 1
    assert "no Fovea runs" in again.output


def test_commands_in_another_folder_find_the_running_fovea(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere, there = tmp_path / "elsewhere", tmp_path / "there"
    elsewhere.mkdir()
    there.mkdir()
    monkeypatch.chdir(elsewhere)
    for name in ("FOVEA_GATEWAY_STATE_DIR", "FOVEA_GATEWAY_DATABASE_URL"):
        monkeypatch.delenv(name, raising=False)
    folder = StateFolder(there)
    folder.hold("http://127.0.0.1:1")
    try:
        assert there in running_folders()
        assert folder_in_use(DEFAULT_STATE_DIR, lambda: [there]) == there
        assert str(there) in capsys.readouterr().err.replace("\n", "")
        assert str(there) in running_hint(DEFAULT_STATE_DIR)
        name_database(lambda: [there])
        assert os.environ.pop("FOVEA_GATEWAY_STATE_DIR") == str(there)
        with pytest.raises(typer.Exit):
            name_database(lambda: [there, elsewhere])
        said = capsys.readouterr().err.replace("\n", "")
        assert f"there is no database in {DEFAULT_STATE_DIR.resolve()}" in said
        assert "or name another folder" in said
        DEFAULT_STATE_DIR.mkdir()
        assert folder_in_use(DEFAULT_STATE_DIR, lambda: [there]) == DEFAULT_STATE_DIR
    finally:
        folder.release()
    assert there not in running_folders()


def test_a_database_is_made_only_in_a_folder_that_is_named(tmp_path: pathlib.Path) -> None:
    access = "fovea_gateway.access.access_command"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FOVEA_GATEWAY_")}

    def run(*programs: tuple[str, ...]) -> list[Ended]:
        return run_copies(access, *programs, cwd=tmp_path, environment=environment)

    looks = [(access, *words, "--state-dir", "named") for words in (("keys", "list"), ("usage",), ("drain", "h:1"))]
    unnamed = [(access, "keys", "create", "--owner", "alice"), (access, "usage")]
    ended = run(*unnamed, ("fovea_gateway.database.migrations", "--to", "4"), *looks)
    assert [done.returncode for done in ended] == [1] * 6
    for done in ended[:3]:
        assert f"{tmp_path / '.fovea'} contains no gateway database: name the gateway's folder" in done.stderr
    for done in ended[3:]:
        assert "named contains no gateway database: name another folder" in done.stderr
    assert list(tmp_path.iterdir()) == [], "a look at the wrong folder must not create one"
    created = run(*[(access, "keys", "create", "--owner", "alice", "--state-dir", "named")] * 2)
    assert [(made.returncode, "a new database" in made.stderr) for made in created] == [(0, True), (0, False)]


def test_a_restart_names_the_cause_if_the_service_cannot_start(tmp_path: pathlib.Path) -> None:
    service = subprocess.Popen(["sleep", "600"])
    item = {"pid": service.pid, "address": "127.0.0.1:1", "restarts": 2, "last_end": "code 7 (OSError: earlier)"}
    folder = StateFolder(tmp_path)

    def write(**changes: object) -> None:
        folder.write({"services": {"gateway": item | changes}, "tls_dir": ""})

    def supervise() -> None:
        service.wait()
        write(pid=None, last_end="SIGKILL")
        write(pid=None, restarts=3, last_end="code 1 (ModuleNotFoundError: No module named 'click')")

    folder.hold("http://127.0.0.1:1")
    supervisor = threading.Thread(target=supervise)
    try:
        write()
        supervisor.start()
        ended = CliRunner().invoke(app, ["restart", "gateway", "--state-dir", str(tmp_path)])
    finally:
        service.kill()
        supervisor.join()
        folder.release()
    assert ended.exit_code == 1
    said = "gateway cannot start: code 1 (ModuleNotFoundError: No module named 'click'). Fovea keeps trying"
    assert ended.output.startswith(said)


def test_where_nobody_has_a_key_the_first_one_is_made_and_shown_once(
    tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert not may_have_keys(tmp_path)
    make_first_key(tmp_path)
    out, told = capfd.readouterr()
    (key,) = out.split()
    assert key.startswith("tml-")
    assert "of admin, scope admin; it is shown only this once" in told
    assert key.encode() not in (tmp_path / "gateway.db").read_bytes()
    assert may_have_keys(tmp_path)


def test_a_url_is_no_grpc_address() -> None:
    ended = CliRunner().invoke(app, ["sessions", "list", "--gateway", "http://127.0.0.1:8000"])
    assert (ended.exit_code, "give host:port of the gRPC server" in ended.output) == (2, True)


def test_help_names_every_command() -> None:
    output = CliRunner().invoke(app, ["--help"]).output
    for command in ("up", "down", "status", "logs", "keys", "checkpoints", "models", "demo", "version"):
        assert f" {command} " in output


def shown(width: int | None) -> str:
    """`fovea status` of four services, on a terminal of this width or, for None, in a pipe."""
    item = {"address": "127.0.0.1:45678", "pid": 1234567, "memory_bytes": 2**31, "gpu_memory_bytes": 70 * 2**30,
            "started_at": time.time() - 400, "restarts": 0, "models": None}  # fmt: skip
    names = ("renderer", "sampler2-a-teacher-with-a-long-name", "trainer", "gateway")
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=width is not None, color_system=None)
    healthy = {name: name != "gateway" for name in names}
    report = {"services": dict.fromkeys(names, item)}
    print_table(lambda most: status_report.services_table(report, healthy, most), console)
    return file.getvalue()


def test_a_narrow_terminal_cuts_no_cell_of_the_status_and_a_pipe_has_whole_lines() -> None:
    whole = shown(None)
    assert len(whole.splitlines()) == 8
    for words in ("127.0.0.1:45678", "1234567", "sampler2-a-teacher-with-a-long-name", "waiting for another service"):
        assert words in whole
    for width in (80, 100, 120):
        narrow = shown(width)
        assert max(map(len, narrow.splitlines())) <= width
        assert "…" not in narrow
        lines = [line.split("│") for line in narrow.splitlines() if "│" in line]
        together = "".join("".join(cells) for cells in zip(*lines, strict=True)).replace(" ", "")
        for words in ("sampler2-a-teacher-with-a-long-name", "2.0 GiB + GPU 70.0", "waiting for another service"):
            assert words.replace(" ", "") in together
