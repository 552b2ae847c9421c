"""What the `fovea` command says to a person who made a mistake."""

import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

import fovea
from fovea.cli import reference_page
from fovea.cli.main import app, make_first_key, may_have_keys
from tests.copies import run_copies


def test_a_model_that_is_not_there_is_named() -> None:
    result = CliRunner().invoke(app, ["up", "--model", "/nowhere/at/all"])
    assert result.exit_code == 2
    assert result.output.startswith("fovea up: --model: there is no folder /nowhere/at/all; ")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "kosmos-9"}, "model_type 'kosmos-9' is not supported; supported are "),
        (
            {"model_type": "qwen2_moe", "num_experts": 60},
            "model_type 'qwen2_moe', which has experts (num_experts), is not",
        ),
        ({"model_type": "glm4v_moe", "vision_config": {}}, "'glm4v_moe' is a vision model that Fovea does not"),
        ({"model_type": "internvl", "vision_config": {}, "text_config": {"num_experts": 128}}, "with experts"),
        ({"model_type": "llava", "vision_config": {"model_type": "clip_vision_model"}, "image_token_index": 1}, "clip"),
        ({"model_type": "llama", "auto_map": {"AutoModel": "model.Model"}}, "brings code of its own (auto_map in"),
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
    assert line.endswith(f"; see which parts work: fovea models check {tmp_path}")
    assert not (tmp_path / "state").exists()


def test_status_without_a_fovea(tmp_path: pathlib.Path) -> None:
    result = CliRunner().invoke(app, ["status", "--state-dir", str(tmp_path)])
    assert result.exit_code == 1
    assert "no Fovea is up" in " ".join(result.output.split())


def test_its_version_and_wrong_uses_are_one_line() -> None:
    assert CliRunner().invoke(app, ["--version"]).output == f"{fovea.__version__}\n"
    wrong = ((["nonsense"], "'nonsense'"), (["up", "--port", "x"], "--port"), (["restart"], "'service'"))
    ended = run_copies("fovea.cli.main", *(["fovea.cli.main", *arguments] for arguments, _ in wrong))
    for (_, words), done in zip(wrong, ended, strict=True):
        (line,) = done.stderr.splitlines()
        assert (done.returncode, done.stdout) == (2, "")
        assert words in line


def test_the_reference_page_is_what_the_commands_say() -> None:
    assert reference_page.PAGE.read_text() == reference_page.page(), "run python -m fovea.cli.reference_page"


HOLDER = """
import pathlib, signal, sys
from fovea.cli.supervisor import StateFolder
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
    assert "no Fovea is up" in again.output


def test_where_nobody_has_a_key_the_first_one_is_made_and_shown_once(
    tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert not may_have_keys(tmp_path)
    make_first_key(tmp_path)
    out, told = capfd.readouterr()
    (key,) = out.split()
    assert key.startswith("tml-")
    assert "of admin, scope admin; it is shown this once" in told
    assert key.encode() not in (tmp_path / "gateway.db").read_bytes()
    assert may_have_keys(tmp_path)


def test_help_names_every_command() -> None:
    output = CliRunner().invoke(app, ["--help"]).output
    for command in ("up", "down", "status", "logs", "keys", "checkpoints", "models", "demo", "version"):
        assert f" {command} " in output
