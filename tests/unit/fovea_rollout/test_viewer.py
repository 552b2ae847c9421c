"""The viewer page: its contents, escaping of model output, and its script in a browser."""

import json
import pathlib
import re
import shutil
import subprocess
from collections.abc import Sequence

import numpy as np
import pytest

from fovea_rollout.line_chart import line_chart
from fovea_rollout.messages import Picture
from fovea_rollout.policies.policy import WeightVersions
from fovea_rollout.trajectory import Failure, Trajectory
from fovea_rollout.viewer import write_viewer
from tests.unit.fovea_rollout.rollouts import rollout, turn

PICTURE = Picture.of_pixels(np.zeros((8, 8, 3), np.uint8))
OTHER = Picture.of_pixels(np.full((8, 8, 3), 200, np.uint8))
BYTES = {7: "é".encode()[:1], 8: "é".encode()[1:], 9: b"</script><script>document.title='owned'</script>", 10: b"\n"}
HOSTILE = "<img src=x onerror=\"document.title='owned'\">{{data}}"


def decode(ids: Sequence[int]) -> str:
    return b"".join(BYTES.get(token, f"t{token} ".encode()) for token in ids).decode(errors="replace")


def trajectories() -> list[Trajectory]:
    first = turn([1, PICTURE], [2, 7, 8, 9], [-0.1, -2.0, -3.0, -0.5], said=[PICTURE, HOSTILE], text=HOSTILE)
    second = turn(
        [1, PICTURE, 2, 7, 8, 9, 3, PICTURE, OTHER, 4], [5], [-0.25], 0.75, WeightVersions(1, 2), [OTHER], near=2.0
    )
    broken = rollout(conversation="broken", failure=Failure("reset", "OSError: no <display>", "Traceback ..."))
    return [rollout(first, second, conversation="whole"), broken]


def data_of(page: str) -> dict:
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(found)


def write(path: pathlib.Path, shown: list[Trajectory] | None = None) -> str:
    curves = {"reward <mean>": [0.1, float("nan"), 0.9]}
    write_viewer(path, trajectories() if shown is None else shown, "A <run>", decode=decode, curves=curves)
    return path.read_text(encoding="utf-8")


def test_everything_is_in_the_page_once(tmp_path: pathlib.Path) -> None:
    page = write(tmp_path / "run.html")
    data = data_of(page)
    assert data["pictures"] == {PICTURE.digest: PICTURE.data_uri, OTHER.digest: OTHER.data_uri}
    assert page.count(PICTURE.data_uri) == 1
    whole, broken = data["trajectories"]
    assert whole["turns"][0]["tokens"] == [[2, "t2 ", -0.1], [7, "", -2.0], [8, "é", -3.0], [9, decode([9]), -0.5]]
    assert whole["turns"][1]["versions"] == [1, 2]
    assert (whole["reward"], whole["tokens"], whole["turns"][1]["metrics"]) == (0.75, 5, {"near": 2.0})
    (segment,) = whole["segments"]
    scores = [row[2] for piece in segment["pieces"] for row in piece.get("tokens", [])]
    assert scores == [None, -0.1, -2.0, -3.0, -0.5, None, None, -0.25], "only sampled tokens must have loss"
    assert [piece["picture"] for piece in segment["pieces"] if "picture" in piece] == [
        PICTURE.digest,
        PICTURE.digest,
        OTHER.digest,
    ]
    assert broken["failure"]["error"] == "OSError: no <display>"


def test_nothing_is_fetched_and_nothing_said_is_markup(tmp_path: pathlib.Path) -> None:
    page = write(tmp_path / "run.html")
    assert "default-src 'none'; img-src data:" in page
    outside = page.replace("http-equiv", "")
    assert not re.search(r"https?:|//cdn|@import|url\(|<link|src=\"(?!data:)", re.sub(r'id="data">.*?</', "", outside))
    assert page.count("<script") == page.count("</script>") == 2
    assert "<title>A &lt;run&gt;</title>" in page
    assert "reward &lt;mean&gt;" in page
    assert HOSTILE not in page
    assert data_of(page)["trajectories"][0]["turns"][0]["messages"][0]["parts"][1] == HOSTILE


def test_a_run_without_anything(tmp_path: pathlib.Path) -> None:
    assert data_of(write(tmp_path / "run.html", [])) == {"trajectories": [], "pictures": {}}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_a_browser_shows_it(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "run.html")

    def shown(place: str) -> str:
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
        command = [
            "chromium",
            *options,
            "--virtual-time-budget=3000",
            "--dump-dom",
            f"file://{tmp_path}/run.html{place}",
        ]
        page = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
        assert "<title>A &lt;run&gt;</title>" in page, "a script that a model wrote must not run"
        return re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)

    first = shown("")
    assert "2 of 2 trajectories" in first
    assert first.count('role="option"') == 2
    assert first.count('class="card turn"') == 2
    assert first.count('class="token"') == 5
    tokens = shown("#0/tokens")
    assert (tokens.count('class="wrote"'), tokens.count('class="read"')) == (5, 3)
    assert tokens.count("<img") == 3
    assert "OSError: no &lt;display&gt;" in shown("#1/conversation")


def test_curves() -> None:
    figure = line_chart("reward", [0.0, float("nan"), 1.0])
    assert figure.count('class="hit"') == 2
    assert "0 → 1" in figure
    assert "step 2: 1" in figure
    assert "–" in line_chart("nothing", [float("nan")])
    assert "2.1e-8" in line_chart("flat", [2.1e-8, 2.1e-8])
    assert "nan" not in line_chart("one", [-3.0])
