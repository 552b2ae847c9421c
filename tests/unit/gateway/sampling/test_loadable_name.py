"""The name of a sampling client's base model leads the SDK to a tokenizer."""

import tempfile
from pathlib import Path

import pytest
from tinker.lib.public_interfaces.sampling_client import _load_tokenizer_from_model_info

import fovea_tinyvlm
from fovea_gateway.sampling.sample_routes import loadable_name


@pytest.mark.parametrize(
    ("name", "tokenizer_id", "loadable"),
    [
        ("Qwen/Qwen3-VL-4B-Instruct", "/models/qwen", "Qwen/Qwen3-VL-4B-Instruct"),
        ("mine", "Qwen/Qwen3-VL-4B-Instruct", "Qwen/Qwen3-VL-4B-Instruct"),
        ("mine/qwen", "Qwen/Qwen3-VL-4B-Instruct", "Qwen/Qwen3-VL-4B-Instruct"),
        ("./qwen", "/data/models/qwen", "/data/models/qwen"),
        ("mine", "/data/models/qwen", "/data/models/qwen"),
        ("/models/foo", "/models/foo", "/models/foo/"),
        ("/foo", "/foo", "/foo"),
        ("org/model/variant", "org/model", "org/model"),
    ],
)
def test_a_name_that_no_hub_has_is_replaced(name: str, tokenizer_id: str, loadable: str) -> None:
    assert loadable_name(name, tokenizer_id) == loadable


def test_the_sdk_loads_the_tokenizer_of_a_folder_of_two_slashes() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        path = Path(folder)
        for file in fovea_tinyvlm.ensure().glob("*token*"):
            (path / file.name).symlink_to(file)
        (path / "config.json").symlink_to(fovea_tinyvlm.ensure() / "config.json")
        assert folder.count("/") == 2
        tokenizer = _load_tokenizer_from_model_info(loadable_name(folder, folder))
    assert tokenizer.decode(tokenizer.encode("red")) == "red"
