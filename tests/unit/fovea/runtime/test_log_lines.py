"""The newest log lines: bounded, searchable, and without secrets, also over gRPC."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import Field

from fovea.client import RendererClient
from fovea.runtime.credentials import REMOVED, SECRET_VARIABLE, Redactor, redactor_of
from fovea.runtime.processes import MOST_LINES, RECENT, LogRing, configure_logging
from fovea.runtime.server import ServiceServer
from fovea.runtime.settings import ServiceSettings
from fovea.wire.conventions import RENDERER_SERVICE
from fovea.wire.errors import Unauthenticated

NONE = Redactor([]).text


@pytest.fixture
def ring() -> LogRing:
    return LogRing()


@pytest.fixture
def log(ring: LogRing) -> logging.Logger:
    logger = logging.Logger("trainer", logging.DEBUG)
    logger.addHandler(ring)
    return logger


def test_the_newest_lines_are_kept(log: logging.Logger) -> None:
    ring = LogRing(most_bytes=2000)
    log.handlers[:] = [ring]
    for number in range(100):
        log.info("line %d", number)
    found = [line.text for line in ring.newest(NONE, 0, "", 50)]
    assert found == [f"line {number}" for number in range(100 - len(found), 100)]
    assert 5 <= len(found) <= 10
    log.info("x" * 100_000)
    assert [len(line.text) for line in ring.newest(NONE, 0, "", 50)] == [4096], "one entry must stay, truncated"


def test_lines_are_found_by_level_and_text(ring: LogRing, log: logging.Logger) -> None:
    log.info("Step 1")
    log.warning("slow")
    try:
        raise ValueError("inner")
    except ValueError:
        log.exception("step 2 failed")
    texts = [line.text.splitlines()[0] for line in ring.newest(NONE, logging.WARNING, "", 9)]
    assert texts == ["slow", "step 2 failed"]
    assert [line.text.splitlines()[0] for line in ring.newest(NONE, 0, "STEP", 9)] == ["Step 1", "step 2 failed"]
    (failed,) = ring.newest(NONE, 0, "valueerror: inner", 9)
    assert failed.level == logging.ERROR
    assert [line.text.splitlines()[0] for line in ring.newest(NONE, 0, "", 1)] == ["step 2 failed"]


def test_a_search_cannot_guess_a_secret(ring: LogRing, log: logging.Logger) -> None:
    log.info("login with s3cr3t-value and tml-abcdefgh")
    clean = Redactor(["s3cr3t-value"]).text
    for guess in ("s3cr3t", "tml-abc"):
        assert ring.newest(clean, 0, guess, 9) == []
    (line,) = ring.newest(clean, 0, "login", 9)
    assert line.text == f"login with {REMOVED} and {REMOVED}"


class _Settings(ServiceSettings):
    model_config = ServiceSettings.model_config | {"env_prefix": "FOVEA_TEST_"}
    client_secret: str = Field("", description="A secret.")
    client_secret_file: Path | None = Field(None, description="A file with it.")


def test_the_secrets_of_settings_are_known(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("from-a-file\n")
    settings = _Settings(client_secret="given-in-settings", client_secret_file=tmp_path / "secret")
    redactor = redactor_of(settings.model_dump(mode="json"))
    assert redactor.text("given-in-settings from-a-file 8000") == f"{REMOVED} {REMOVED} 8000"


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    logger = logging.getLogger()
    before, level = logger.handlers[:], logger.level
    yield logger
    logger.handlers[:], logger.level = before, level
    RECENT.filters.clear()


async def test_a_service_shows_its_lines_only_to_callers_with_its_secret(
    root: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure_logging("test")
    root.handlers[0].stream = sys.stderr  # type: ignore[attr-defined]
    monkeypatch.setenv(SECRET_VARIABLE, "x" * 40)
    server = ServiceServer(ServiceSettings(drain_s=0), [RENDERER_SERVICE])
    await server.start()
    async with RendererClient(server.address) as client:
        root.warning("the secret of this log test is %s", "x" * 40)
        (line,) = await client.log_lines(logging.WARNING, "secret of THIS log test", MOST_LINES)
        assert line.text == f"root: the secret of this log test is {REMOVED}"
        assert line.level == logging.WARNING
        assert len(await client.log_lines(0, "", 1)) == 1
    monkeypatch.delenv(SECRET_VARIABLE)
    async with RendererClient(server.address) as stranger:
        with pytest.raises(Unauthenticated):
            await stranger.log_lines(0, "", 1)
    await server.grpc.stop(0)


@pytest.mark.parametrize("word", ["a" * 4096, "a-" * 2048, "x_" * 2048])
def test_a_name_of_a_secret_is_found_at_the_end_of_a_long_word(word: str) -> None:
    redactor = Redactor([])
    assert redactor.text(f"{word}_password=hunter2 next") == f"{word}_password={REMOVED} next"
    assert redactor.text(word) == word
