"""Errors and warnings of the first-model example, for models that cannot load and for two
computations that disagree.
"""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from examples.download import CannotTry, check_room, checkpoint
from examples.first_model import Agreement, judge, main

CODES = {"gated": (403, "GatedRepo"), "private": (404, "RepoNotFound"), "without": (404, "EntryNotFound")}


class Refusal(BaseHTTPRequestHandler):
    """A hub that refuses every file, with another status for each owner."""

    def do_HEAD(self) -> None:
        status, code = CODES[self.path.split("/")[1]]
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def refusals(tmp_path: Path, names: list[str], **environment: str) -> list[str]:
    """Returns the errors of models with these names, from another process because the hub's address is read once."""
    code = (
        "import sys\n"
        "from examples.download import CannotTry, checkpoint\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n"
        "        checkpoint(name)\n"
        "    except CannotTry as error:\n"
        "        print(error)\n"
    )
    own = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    ended = subprocess.run(
        [sys.executable, "-c", code, *names],
        env=own | {"HF_HOME": str(tmp_path)} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return ended.stdout.splitlines()


def test_what_the_hub_refuses(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusal) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            endpoint = f"http://127.0.0.1:{server.server_port}"
            gated, private, without = refusals(tmp_path, [f"{owner}/model" for owner in CODES], HF_ENDPOINT=endpoint)
        finally:
            server.shutdown()
    assert gated.startswith(
        f"gated/model is gated: accept its terms at {endpoint}/gated/model, then run `hf auth login`"
    )
    assert private.startswith("private/model is neither a directory nor a model on the hub that you may see")
    assert without.startswith("without/model is neither a directory nor a model on the hub that you may see")


def test_a_name_without_a_network(tmp_path: Path) -> None:
    (said,) = refusals(tmp_path, ["some/model"], HF_HUB_OFFLINE="1")
    assert (
        said
        == "some/model is not on this machine, and the hub cannot be reached: give a directory, or connect to a network"
    )


def test_what_cannot_be_tried_is_said_in_a_line_with_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["first_model", "--model", str(tmp_path / "nowhere")])
    assert main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"could not be tried: {tmp_path}/nowhere: ")


def test_a_model_that_fovea_does_not_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "ernie4_5_vl_moe", "vision_config": {}}))
    with pytest.raises(CannotTry, match=rf"ernie4_5_vl_moe.*supported are.*fovea models check {tmp_path}"):
        checkpoint(str(tmp_path))
    with pytest.raises(CannotTry, match=r"config\.json does not exist"):
        checkpoint(str(tmp_path / "nowhere"))


def test_a_disk_that_is_too_small(tmp_path: Path) -> None:
    check_room("big/model", 1, tmp_path / "cache")
    with pytest.raises(
        CannotTry, match=rf"big/model needs 1073741824.0 GiB; {tmp_path} has .* make room, or set HF_HOME"
    ):
        check_room("big/model", 2**60, tmp_path)


def test_a_model_that_is_computed_in_two_ways_or_is_blind_is_wrong() -> None:
    assert list(Agreement(most=0.2, kl=1e-3, change=0.1).problems("then")) == []
    (apart,) = Agreement(most=0.2, kl=0.5, change=0.1).problems("then")
    assert apart.startswith("then, sampler and trainer compute the model differently: KL 5.0e-01")
    (blind,) = Agreement(most=0.0, kl=0.0, change=0.0).problems("then")
    assert "other pictures change nothing" in blind
    (deaf,) = Agreement(most=0.0, kl=0.0, change=0.0).problems("then", "texts")
    assert deaf.endswith("the model sees no texts")
    assert len(list(Agreement(float("nan"), float("nan"), float("nan")).problems("then"))) == 2


def test_the_verdict_is_the_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert judge([]) == 0
    assert judge(["nothing is learnt", "the model does not see"]) == 1
    good, *wrong = capsys.readouterr().out.splitlines()
    assert good.startswith("GOOD: ")
    assert wrong == ["WRONG: nothing is learnt", "WRONG: the model does not see"]


def test_a_wrong_address_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["first_model", "--base-url", "http://127.0.0.1:1"])
    assert main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("could not be tried: no server responds at http://127.0.0.1:1")
