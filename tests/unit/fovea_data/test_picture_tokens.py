"""Numbers of tokens of pictures, from files or by request, once per size."""

import json
import pathlib

import pytest

import fovea_tinyvlm
from fovea.wire.errors import FailedPrecondition
from fovea_data import PictureTokens, read_picture, token_count
from fovea_data.picture_tokens import checkpoint_formula
from fovea_rollout.messages import Picture
from tests.unit.fovea_data.pictures import encoded


@pytest.mark.parametrize(("size", "tokens"), [((8, 8), 64), ((224, 224), 64), ((512, 256), 128), ((640, 480), 300)])
def test_a_checkpoints_files_tell(size: tuple[int, int], tokens: int) -> None:
    assert token_count(fovea_tinyvlm.ensure("qwen3_vl"), size) == tokens


def test_older_files_give_their_bounds_by_other_names(tmp_path: pathlib.Path) -> None:
    source = fovea_tinyvlm.ensure("qwen3_vl")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    settings = json.loads((source / "preprocessor_config.json").read_text())
    size = settings.pop("size")
    settings |= {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    formula = checkpoint_formula(tmp_path)
    assert formula is not None
    assert formula(640, 480) == token_count(source, (640, 480))


def test_a_server_is_asked_once_per_size() -> None:
    asked: list[Picture] = []

    def ask(picture: Picture) -> int:
        asked.append(picture)
        return 10 * len(asked)

    tokens = PictureTokens(None, ask)
    pictures = [read_picture(encoded("PNG", red, size)) for red, size in ((0, (8, 8)), (90, (8, 8)), (0, (16, 8)))]
    assert [tokens.of(picture) for picture in pictures] == [10, 10, 20]
    assert asked == [pictures[0], pictures[2]]


def test_a_model_whose_files_do_not_tell_is_refused() -> None:
    with pytest.raises(FailedPrecondition, match="give a sampling client instead"):
        token_count(fovea_tinyvlm.ensure("qwen3"), (64, 64))
