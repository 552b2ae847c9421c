"""The composition root."""

import socket

import pytest
from pydantic import ValidationError

from gateway.app import _listen
from gateway.settings import GatewaySettings


def test_answers_do_not_wait_for_an_ack() -> None:
    with _listen("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP, "asyncio sets TCP_NODELAY on such sockets only"


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOVEA_GATEWAY_POLL_HOLD_S", "7")
    settings = GatewaySettings(model_name="n", model="/m", renderer=["r:1"], sampler=["s:1"], trainer="t:1")
    assert settings.poll_hold_s == 7
    assert settings.tokenizer_id == "/m"
    assert settings.store_url.startswith("sqlite:////")
    assert settings.checkpoint_root.endswith("fovea-state/checkpoints")


@pytest.mark.parametrize("url", ["nosuch://bucket", "gs://bucket"])
def test_storage_without_a_driver_is_refused_by_name(url: str) -> None:
    with pytest.raises(ValidationError, match=r"checkpoint_dir\n.*cannot be opened: .*(Protocol not known|gcsfs)"):
        GatewaySettings(
            model_name="n", model="/m", renderer=["r:1"], sampler=["s:1"], trainer="t:1", checkpoint_dir=url
        )
