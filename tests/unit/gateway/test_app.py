"""The composition root."""

import socket

import pytest
from pydantic import ValidationError

from fovea_gateway.http.connections import listen
from fovea_gateway.settings import GatewaySettings


def test_answers_do_not_wait_for_an_ack() -> None:
    with listen("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP, "asyncio sets TCP_NODELAY only on such sockets"


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOVEA_GATEWAY_POLL_HOLD_S", "7")
    settings = GatewaySettings(model_name="n", model="/m", renderer=["r:1"], sampler=["s:1"], trainer="t:1")
    assert settings.poll_hold_s == 7
    (base_model,) = settings.base_models
    assert base_model.tokenizer_id == "/m"
    assert settings.store_url.startswith("sqlite:////")
    assert settings.checkpoint_root.endswith("fovea-state/checkpoints")


def test_limits_are_on_where_other_machines_reach_the_gateway() -> None:
    own = {"model_name": "n", "model": "/m", "renderer": ["r:1"], "sampler": ["s:1"], "trainer": "t:1"}
    assert GatewaySettings(**own).owner_limits == {}
    for host in ("0.0.0.0", "::", "10.1.2.3"):
        limits = GatewaySettings(**own, host=host, api_key=["tml-key"]).owner_limits
        assert {"max_requests_per_s", "max_tokens_in_flight", "max_stored_bytes"} == set(limits)
        assert all(value > 0 for value in limits.values())
        assert GatewaySettings(**own, host=host, api_key=["tml-key"], default_limits={}).owner_limits == {}
    assert GatewaySettings(**own, default_limits={"max_models": 3}).owner_limits == {"max_models": 3}
    for wrong, words in (({"max_model": 3}, "there is no limit 'max_model'"), ({"max_models": -1}, "max_models is -1")):
        with pytest.raises(ValidationError, match=words):
            GatewaySettings(**own, default_limits=wrong)


@pytest.mark.parametrize("url", ["nosuch://bucket", "gs://bucket"])
def test_storage_without_a_driver_is_refused_by_name(url: str) -> None:
    with pytest.raises(ValidationError, match=r"checkpoint_dir\n.*cannot be opened: .*(Protocol not known|gcsfs)"):
        GatewaySettings(
            model_name="n", model="/m", renderer=["r:1"], sampler=["s:1"], trainer="t:1", checkpoint_dir=url
        )


def test_base_models_have_names_of_their_own() -> None:
    own = {"model_name": "n", "model": "/m", "renderer": ["r:1"], "sampler": ["s:1"]}
    settings = GatewaySettings(**own, trainer="t:1", further_models=[own | {"model_name": "teacher"}])
    assert [(base_model.model_name, base_model.trainer) for base_model in settings.base_models] == [
        ("n", ["t:1"]), ("teacher", []),
    ]  # fmt: skip
    with pytest.raises(ValidationError, match="two base models have the name 'n'"):
        GatewaySettings(**own, trainer="t:1", further_models=[own])


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--trainer", "t:1"], ["t:1"]),
        (["--trainer", "t:1", "--trainer=t:2"], ["t:1", "t:2"]),
        (["--trainer", '["t:1", "[::1]:2"]'], ["t:1", "[::1]:2"]),
        (["--trainer", "[::1]:2"], ["[::1]:2"]),
    ],
)
def test_a_base_model_may_have_several_trainers(words: list[str], found: list[str]) -> None:
    own = ["--model-name", "n", "--model", "/m", "--renderer", "r:1", "--renderer", "r:2", "--sampler", "[]"]
    assert GatewaySettings.from_command_line("gateway", [*own, *words]).trainer == found
    assert GatewaySettings(model_name="n", model="/m", renderer=["r:1"], sampler=[], trainer=found).trainer == found


def test_a_setting_of_one_value_is_not_given_twice(capsys: pytest.CaptureFixture[str]) -> None:
    twice = [
        "--model-name",
        "n",
        "--model",
        "/m",
        "--renderer",
        "r:1",
        "--trainer",
        "t:1",
        "--sampler",
        "[]",
        "--model=n",
    ]
    with pytest.raises(SystemExit):
        GatewaySettings.from_command_line("gateway", twice)
    assert "gateway: --model: it is given twice, but takes one value" in capsys.readouterr().err
    assert GatewaySettings.find_problem(twice) == ("model", "it is given twice, but takes one value; remove one")


def test_a_trainer_that_is_given_twice_and_none_at_all_are_refused() -> None:
    own = {"model_name": "n", "model": "/m", "renderer": ["r:1"], "sampler": list[str]()}
    with pytest.raises(ValidationError, match="'t:1' is given twice; give each trainer once"):
        GatewaySettings(**own, trainer=["t:1", "t:1"])
    for none in ("", [], [""], "[]"):
        with pytest.raises(ValidationError, match="neither --trainer nor --sampler"):
            GatewaySettings(**own, trainer=none)
