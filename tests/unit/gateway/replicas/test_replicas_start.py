"""The log of the start of a process that the gateway calls."""

import logging

import pytest

from fovea.runtime.hosts import free_ports
from fovea_gateway.replicas import replicas
from fovea_gateway.replicas.renderers import Renderer


async def test_a_start_is_waited_for_in_one_line_and_a_longer_one_logs_its_error(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, replicas.__name__)
    (port,) = free_ports(1)
    renderer = Renderer(f"127.0.0.1:{port}", 1, lambda: None, lambda name, files: None, lambda owner: 1.0)
    for _ in range(2):
        await renderer.refresh()
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert said == [("INFO", f"renderer 127.0.0.1:{port} does not answer yet: waiting for it")]
    monkeypatch.setattr(replicas, "_QUIET_S", 0.0)
    monkeypatch.setattr(replicas, "_REPEAT_S", 0.0)
    await renderer.refresh()
    slow = caplog.records.pop()
    assert slow.levelname == "INFO"
    assert slow.getMessage().startswith(f"renderer 127.0.0.1:{port} does not answer yet: failed to connect")
    monkeypatch.setattr(replicas, "_REPEAT_S", 60.0)
    monkeypatch.setattr(replicas, "_STARTING_S", 0.0)
    for _ in range(2):
        await renderer.refresh()
    (late,) = caplog.records[1:]
    assert late.levelname == "WARNING"
    assert late.getMessage().startswith(f"renderer 127.0.0.1:{port} is not used: failed to connect")
    assert renderer.reason.startswith("failed to connect")
    monkeypatch.setattr(replicas, "_REPEAT_S", 0.0)
    await renderer.refresh()
    assert [record.getMessage() for record in caplog.records[2:]] == [late.getMessage()], "it is repeated"
    await renderer.client.close()
