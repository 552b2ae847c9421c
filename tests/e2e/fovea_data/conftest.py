"""A model that is fine-tuned on a folder of pictures and exported, once for all tests of this folder."""

import pathlib
from dataclasses import dataclass

import pytest
import tinker

from fovea_data import FineTuneSettings, TunedModel, fine_tune, image_folder
from fovea_demo.digits import QUESTION
from tests.e2e.fovea_data.test_fine_tuning import digits
from tests.e2e.stack import API_KEY, Stack

Answers = list[list[int]]


@dataclass(frozen=True)
class Trained:
    """A fine-tuned model, its exports, and its answers to held-out pictures; `said` is the answer to the first one."""

    model: TunedModel
    adapter: pathlib.Path
    merged: pathlib.Path
    asked: list[tuple[str, str]]
    answers: Answers
    said: str


@pytest.fixture(scope="package")
def trained(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    place = tmp_path_factory.mktemp("exports")
    train, held_out = image_folder(digits(place / "digits", 300), QUESTION).split(0.2)
    settings = FineTuneSettings(
        evaluate_every=60
    )  # twice instead of eight times, because test_fine_tuning.py covers each epoch's
    with fine_tune(
        train, held_out, settings, out=place / "run", base_url=stack.base_url, api_key=API_KEY, progress=False
    ) as model:
        adapter, merged = model.export(place / "adapter"), model.export(place / "merged", merged=True)
        encoder, sampling = model.connection.encoder, model.sampling
        assert sampling is not None
        params = tinker.SamplingParams(max_tokens=8, temperature=0.0, stop=list(encoder.stop_ids))
        pending = [sampling.sample(encoder.prompt(row.question), 1, params) for row in held_out]
        answers = [list(future.result().sequences[0].tokens) for future in pending]
        said = model.ask(pathlib.Path(held_out[0].where))  # the question of training
    # Its session has ended, so the trainer no longer holds it.
    return Trained(model, adapter, merged, [(row.where, QUESTION) for row in held_out], answers, said)
