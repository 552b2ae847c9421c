"""Fine-tuning through the real SDK and gateway: rows are checked before the first step, and
pictures keep their size.
"""

import asyncio
import io
import json
import pathlib
import re
import shutil
import socket
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
from PIL import Image

import fovea_tinyvlm
from fovea.wire.errors import FailedPrecondition, InvalidInput
from fovea_data import Dataset, FineTuneSettings, TunedModel, fine_tune, image_folder, load_chats
from fovea_data.evaluate import read_sources
from fovea_data.served_limits import checkpoint_metadata, picture_side
from fovea_rollout.stopping import Stopped
from tests.contract.gateway.conftest import KEY, Stand, running
from tests.waiting import eventually

Rows = list[dict[str, Any]]
TEXT = {"prompt": "Is it?", "completion": "yes"}
QUICK = FineTuneSettings(epochs=1, batch_size=4, rank=4)


def picture(size: tuple[int, int] = (640, 480), red: int = 9) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.full((size[1], size[0], 3), (red, 0, 0), np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


SEEN = {**TEXT, "image": picture()}
BROKEN = {**TEXT, "image": picture()[:100]}


async def tuned(
    stand: Stand,
    out: pathlib.Path,
    rows: Rows | Dataset,
    held_out: Rows | None = None,
    settings: FineTuneSettings = QUICK,
    use: Callable[[TunedModel], Any] = lambda model: model.weights,
    progress: bool | None = False,
    **options: Any,
) -> Any:
    """Fine-tunes; returns the result of `use` on the model, by default the path of its weights."""

    def run() -> Any:
        train = load_chats(rows) if isinstance(rows, list) else rows
        held = None if held_out is None else load_chats(held_out)
        with fine_tune(
            train, held, settings, out=out, base_url=stand.url, api_key=KEY, progress=progress, **options
        ) as model:
            return use(model)

    return await asyncio.to_thread(run)


def datum_count(stand: Stand) -> int:
    return sum(len(datums) for header, datums in stand.trainer.of("ForwardBackward") if header.backward)


async def test_other_rows_in_the_same_folder_are_refused_by_name(stand: Stand, tmp_path: pathlib.Path) -> None:
    out = tmp_path / "run"
    weights = await tuned(stand, out, [TEXT] * 8, [TEXT])
    assert await tuned(stand, out, [TEXT] * 8, [TEXT]) == weights
    other = {**TEXT, "completion": "no"}
    with pytest.raises(InvalidInput, match=r"to a run with rows .*: give another folder, or the same"):
        await tuned(stand, out, [TEXT] * 7 + [other], [TEXT])
    with pytest.raises(InvalidInput, match="to a run with held-out rows"):
        await tuned(stand, out, [TEXT] * 8, [other])
    with pytest.raises(InvalidInput, match="to a run with epochs 1, not 2"):
        await tuned(stand, out, [TEXT] * 8, [TEXT], FineTuneSettings(epochs=2, batch_size=4, rank=4))


async def test_a_line_says_why_training_stopped_and_which_weights_are_kept(
    stand: Stand, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand.trainer.learns = False
    early = FineTuneSettings(epochs=9, batch_size=4, rank=4, patience=2)
    weights = await tuned(stand, tmp_path / "early", [TEXT] * 4, [TEXT], early, progress=None)
    loss = json.loads((tmp_path / "early" / "state.json").read_text())["best_loss"]
    kept = f"kept step 1, which has the lowest held-out loss ({loss:.3f}): {weights}"
    end = f"stopped early at step 3 of 9: no better held-out loss in 2 evaluations; {kept}"
    assert capsys.readouterr().err.splitlines()[-1] == end
    curves = ["Loss of an answer token", "Held-out loss", "Held-out accuracy"]
    assert drawn(tmp_path / "early") == {curve: [1, 2, 3] for curve in curves}
    await tuned(stand, tmp_path / "early", [TEXT] * 4, [TEXT], early, progress=None)
    assert capsys.readouterr().err.splitlines()[-1] == f"nothing left to train, the run had {end}"
    weights = await tuned(stand, tmp_path / "whole", [TEXT] * 4, progress=None)
    assert capsys.readouterr().err.splitlines()[-1] == f"finished all 1 steps; kept step 1: {weights}"
    await tuned(stand, tmp_path / "silent", [TEXT] * 4, progress=False)
    assert capsys.readouterr().err == ""


async def test_another_picture_is_another_row(stand: Stand, tmp_path: pathlib.Path) -> None:
    await tuned(stand, tmp_path / "run", [SEEN] * 4)
    with pytest.raises(InvalidInput, match="to a run with rows"):
        await tuned(stand, tmp_path / "run", [SEEN] * 3 + [{**SEEN, "image": picture(red=10)}])


@pytest.mark.parametrize(
    "row",
    [
        BROKEN,
        {"prompt": "q", "completion": 7},
        {"prompt": 3, "completion": "a"},
        {"prompt": "q " * 3000, "completion": "a"},
        {"prompt": "\ud800", "completion": "a"},
        {"messages": [[1]]},
        {"messages": "hello"},
        {"prompt": "q", "completion": "a", "image": picture((3000, 8))},
    ],
    ids=["picture", "number", "prompt", "long", "surrogate", "list", "text", "thin picture"],
)
async def test_any_broken_row_is_named_before_the_first_step_or_left_out(
    stand: Stand, tmp_path: pathlib.Path, row: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    for rows, held_out in (([TEXT, row], None), ([TEXT], [TEXT, row])):
        with pytest.raises(InvalidInput, match=r"^rows\[1\]"):
            await tuned(stand, tmp_path / "refused", rows, held_out)
    assert datum_count(stand) == 0
    skipping = FineTuneSettings(epochs=1, batch_size=4, rank=4, broken_rows="skip")
    await tuned(stand, tmp_path / "skipped", [TEXT, row, TEXT], [row, TEXT], skipping)
    assert datum_count(stand) == 2
    assert "1 of 3 rows of train are broken and left out" in caplog.text
    assert "1 of 2 rows of held_out are broken and left out" in caplog.text


async def test_rows_of_which_all_are_broken_are_an_error(stand: Stand, tmp_path: pathlib.Path) -> None:
    skipping = FineTuneSettings(rank=4, broken_rows="skip")
    with pytest.raises(InvalidInput, match=r"all 2 rows of train are broken; the first: rows\[0\]"):
        await tuned(stand, tmp_path / "run", [BROKEN] * 2, None, skipping)
    with pytest.raises(InvalidInput, match="all 1 rows of held_out are broken"):
        await tuned(stand, tmp_path / "run", [TEXT], [BROKEN], skipping)


async def test_a_right_answer_beside_a_longer_one_has_room_in_the_context(stand: Stand, tmp_path: pathlib.Path) -> None:
    long, talkative = {"prompt": "q " * 950, "completion": "a"}, {"prompt": "q", "completion": "a " * 300}
    await tuned(stand, tmp_path / "run", [TEXT], [long, talkative])


async def test_pictures_are_asked_at_the_size_and_with_the_question_of_training(
    stand: Stand, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "birds" / "robin").mkdir(parents=True)
    large = tmp_path / "birds" / "robin" / "0.png"
    large.write_bytes(picture((1600, 1200)))
    rows = image_folder(tmp_path / "birds", "Which?", system_prompt="Name it.")

    def use(model: TunedModel) -> tuple[str, str]:
        model.ask(large)
        return model.weights, model.state

    weights, state = await tuned(stand, tmp_path / "run", rows, use=use)
    chunks = [chunk for request in stand.renderer.of("Render") for chunk in request.input.chunks]
    images = {chunk.image.data for chunk in chunks if chunk.WhichOneof("kind") == "image"}
    assert {Image.open(io.BytesIO(data)).size for data in images} == {(512, 384)}
    rest = tinker.RestClient(base_url=stand.url, api_key=KEY)
    for path in (weights, state):
        assert await asyncio.to_thread(checkpoint_metadata, rest, path) == {
            "max_picture_side": "512", "fovea_question": "Which?", "fovea_system_prompt": "Name it."
        }  # fmt: skip
    whole = load_chats([{**TEXT, "image": picture((512, 384))}], max_side=None)
    weights = await tuned(stand, tmp_path / "whole", whole)
    metadata = await asyncio.to_thread(checkpoint_metadata, rest, weights)
    assert metadata == {"max_picture_side": "0", "fovea_question": TEXT["prompt"]}
    assert picture_side(metadata, 7) is None
    others = load_chats([SEEN, {**SEEN, "prompt": "Or not?"}])
    weights = await tuned(stand, tmp_path / "others", others)
    assert await asyncio.to_thread(checkpoint_metadata, rest, weights) == {"max_picture_side": "512"}


async def test_held_out_pictures_of_another_size_are_refused(stand: Stand, tmp_path: pathlib.Path) -> None:
    with pytest.raises(InvalidInput, match="held_out has max_side 512, but train has 256"):
        await tuned(stand, tmp_path / "run", load_chats([SEEN], max_side=256), [SEEN])


async def test_a_rank_above_the_servers_is_refused_before_anything(stand: Stand, tmp_path: pathlib.Path) -> None:
    with pytest.raises(InvalidInput, match="rank is 65, but this server accepts 64 at most"):
        await tuned(stand, tmp_path / "run", [TEXT], None, FineTuneSettings(rank=65))
    assert stand.trainer.calls == []


async def test_a_rate_of_zero_is_zero(stand: Stand, tmp_path: pathlib.Path) -> None:
    await tuned(stand, tmp_path / "run", [TEXT], None, FineTuneSettings(epochs=1, rank=4, learning_rate=0.0))
    assert [step.adam.learning_rate for step in stand.trainer.of("OptimStep")] == [0.0]


async def test_a_model_that_diverged_is_told_with_step_and_rate(stand: Stand, tmp_path: pathlib.Path) -> None:
    said = InvalidInput("datum[0]: its cross_entropy loss is nan; check its loss_inputs", field="datum[0]")
    stand.trainer.failures["ForwardBackward"] = [said] * 9
    with pytest.raises(FailedPrecondition, match=r"the model diverged at step 1, at a learning rate of .*: lower"):
        await tuned(stand, tmp_path / "run", [TEXT])


async def test_rows_that_the_server_alone_refuses_are_named(stand: Stand, tmp_path: pathlib.Path) -> None:
    unlike = {**TEXT, "image": picture((64, 64))}  # it would take a different number of tokens from the fakes' pictures
    with pytest.raises(
        InvalidInput, match=r"the server refused step 1 with the rows rows\[\d\], rows\[\d\]: .*expected"
    ):
        await tuned(stand, tmp_path / "run", [TEXT, unlike])


class Interrupted:
    """A logger that simulates Ctrl-C at a step."""

    def __init__(self, at: int) -> None:
        self._at = at

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        if step == self._at:
            raise KeyboardInterrupt

    def close(self) -> None: ...


async def test_ctrl_c_says_where_the_run_goes_on(stand: Stand, tmp_path: pathlib.Path) -> None:
    settings = FineTuneSettings(epochs=4, batch_size=1, rank=4, evaluate_every=2)

    def run(at: int) -> str:
        try:
            asyncio.run(tuned(stand, tmp_path / "run", [TEXT], None, settings, loggers=[Interrupted(at)]))
        except Stopped as stopped:
            return str(stopped.code)
        raise AssertionError("the run was not stopped")

    said = await asyncio.to_thread(run, 1)
    assert said.startswith("stopped before the first evaluation finished, so nothing is kept: call fine_tune again")
    said = await asyncio.to_thread(run, 3)
    assert said.startswith("stopped: call fine_tune again with the same settings and rows and out=")
    assert said.endswith("to resume after step 2")
    assert drawn(tmp_path / "run") == {"Loss of an answer token": [1, 2, 3]}
    await tuned(stand, tmp_path / "run", [TEXT], None, settings)
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4]
    assert drawn(tmp_path / "run") == {"Loss of an answer token": steps}


def drawn(folder: pathlib.Path) -> dict[str, list[int]]:
    """Returns the steps of each curve of a run's chart."""
    _, *figures = (folder / "chart.html").read_text().split("<figure")
    named = [(re.findall("<span>(.*?)</span>", one), re.findall("step (\\d+): ", one)) for one in figures]
    return {name: [int(step) for step in steps] for (name,), steps in named}


async def test_the_live_page_knows_a_run_by_its_folder_with_its_held_out_figures(
    stand: Stand, tmp_path: pathlib.Path
) -> None:
    for number in range(2):  # the second call resumes the finished run: a new model with the same curve
        await tuned(stand, tmp_path / "birds", [TEXT] * 8, [TEXT])
        async with stand.http() as http:
            runs = (await http.get("training_runs")).json()["training_runs"]
            assert [run["user_metadata"]["name"] for run in runs] == ["birds"] * (number + 1)
            for run in runs:
                place = f"live/curves/{run['training_run_id']}"

                async def has_steps(http: httpx.AsyncClient = http, place: str = place) -> bool:
                    return bool((await http.get(place)).json()["last_step"] == 2)

                await eventually(has_steps)
                known = set((await http.get(place)).json()["curves"])
                assert {"learning_rate", "held_out_loss", "accuracy", "kept_step"} <= known


async def test_the_live_page_has_the_answers_to_held_out_rows_by_label(stand: Stand, tmp_path: pathlib.Path) -> None:
    other = {**TEXT, "completion": "no"}
    await tuned(stand, tmp_path / "run", [TEXT] * 8, [TEXT, other, TEXT, TEXT])
    async with stand.http() as http:
        (run,) = (await http.get("training_runs")).json()["training_runs"]
        found = (await http.get(f"live/curves/{run['training_run_id']}")).json()["answers"]
        groups = (await http.get(f"live/samples?source={run['training_run_id']}")).json()["groups"]
    assert (found["step"], found["labels"]) == (2, ["no", "yes"])
    assert [sum(row) for row in found["counts"]] == [1, 3]
    drawn = [one for group in groups for one in group["drawn"]]
    assert [(one["held_out"], one["reward"] in (0.0, 1.0)) for one in drawn] == [(True, True)] * 4
    assert {group["truth"] for group in groups} <= {"yes", "no"}


def test_without_a_server_it_is_told_at_once(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        monkeypatch.setattr(
            "fovea.client.gateway._REST_PORT", taken.getsockname()[1]
        )  # on other addresses a service may listen
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(FailedPrecondition, match=f"no server responds at {url} .*: start one with `fovea up`"):
            fine_tune(load_chats([TEXT]), out=tmp_path, base_url=url, api_key=KEY)


def test_what_is_evaluated_is_shrunk_too(tmp_path: pathlib.Path) -> None:
    (tmp_path / "robin").mkdir()
    (tmp_path / "robin" / "0.png").write_bytes(picture((1600, 1200)))
    for side, size in ((512, (512, 384)), (None, (1600, 1200))):
        _, (source,) = read_sources(tmp_path, max_side=side)
        (message,) = source().reset()  # type: ignore[operator]
        assert message.pictures[0].size == size


@pytest.mark.parametrize(("asked", "trained"), [(None, False), (True, True), (False, False)])
async def test_a_tied_unembedding_is_trained_only_if_asked_for(
    stand: Stand, tmp_path: pathlib.Path, asked: bool | None, trained: bool
) -> None:
    settings = FineTuneSettings(epochs=1, batch_size=4, rank=4, train_unembed=asked)
    await tuned(stand, tmp_path / "run", [TEXT], None, settings)
    (request,) = stand.trainer.of("CreateModel")
    assert (request.lora.train_unembedding, request.lora.train_mlp) == (trained, True)


async def test_an_unembedding_of_its_own_is_trained(stand: Stand, tmp_path: pathlib.Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(fovea_tinyvlm.ensure(), model, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((model / "config.json").read_text())
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = False
    (model / "config.json").write_text(json.dumps(config))
    await stand.stop()
    async with running(Stand(tmp_path / "untied"), model=str(model)) as untied:
        await tuned(untied, tmp_path / "run", [TEXT])
        (request,) = untied.trainer.of("CreateModel")
    assert request.lora.train_unembedding
