"""What the `fovea` command says to a person who made a mistake."""

import pathlib

from typer.testing import CliRunner

from fovea.cli.main import app


def test_a_model_that_is_not_there_is_named() -> None:
    result = CliRunner().invoke(app, ["up", "--model", "/nowhere/at/all"])
    assert result.exit_code == 2
    assert "/nowhere/at/all has no config.json" in " ".join(result.output.replace("│", " ").split())


def test_an_unknown_architecture_is_refused_in_one_line_before_anything_starts(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "kosmos-9"}')
    result = CliRunner().invoke(app, ["up", "--model", str(tmp_path), "--state-dir", str(tmp_path / "state")])
    assert result.exit_code == 1
    assert result.output.splitlines() == [
        f"{tmp_path} has model_type 'kosmos-9', which Fovea does not know; see how much of it works: "
        f"fovea models check {tmp_path}"
    ]
    assert not (tmp_path / "state").exists()


def test_status_without_a_fovea(tmp_path: pathlib.Path) -> None:
    result = CliRunner().invoke(app, ["status", "--state-dir", str(tmp_path)])
    assert result.exit_code == 1
    assert "no Fovea is up" in " ".join(result.output.split())


def test_other_machines_need_a_key(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    arguments = ["up", "--model", str(tmp_path), "--host", "0.0.0.0", "--state-dir", str(tmp_path / "state")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    words = " ".join(result.output.replace("│", " ").split())
    assert "--host" in words
    assert "other machines reach 0.0.0.0: make a key first" in words
    assert not (tmp_path / "state").exists()


def test_help_names_every_command() -> None:
    output = CliRunner().invoke(app, ["--help"]).output
    for command in ("up", "status", "keys", "models", "demo", "version"):
        assert f" {command} " in output
