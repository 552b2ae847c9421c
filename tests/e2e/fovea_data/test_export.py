"""A folder of pictures becomes an adapter and a merged model, with which plain transformers and vLLM answer as Fovea
does.
"""

import base64
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest

from fovea.runtime.hosts import free_ports
from fovea.wire.errors import AlreadyExists, InvalidInput, NotFound
from fovea_data import export_model
from fovea_demo.digits import QUESTION
from tests.e2e.fovea_data.conftest import Answers, Trained
from tests.e2e.stack import API_KEY, Stack

HERE = pathlib.Path(__file__).parent
pytestmark = pytest.mark.timeout(900)  # the first test trains
FOVEA = pathlib.Path(sys.executable).with_name("fovea")


def strangers_environment() -> dict[str, str]:
    """Returns the environment of a program without Fovea's settings, with a small vLLM."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FOVEA", "TINKER", "VLLM"))}
    return kept | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # its engine in its own process, which saves a start
        "OMP_NUM_THREADS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCH_COMPILE_DISABLE": "1",
    }


def plain(program: str, trained: Trained, *model: pathlib.Path) -> list[Answers]:
    """Returns another program's answers by line; it must not import any module of Fovea."""
    ran = subprocess.run(
        [sys.executable, HERE / program, *model],
        input=json.dumps(trained.asked),
        env=strangers_environment(),
        cwd=model[-1],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("[[")]


def test_held_out_pictures_are_answered_right(trained: Trained) -> None:
    assert len(trained.answers) == 60
    assert trained.model.best["accuracy"] >= 0.9, trained.model.history
    assert trained.said == trained.model.connection.encoder.read(trained.answers[0], is_cut=False)


def test_plain_transformers_answers_alike_to_the_token(trained: Trained, stack: Stack) -> None:
    """With the merged model, and with the adapter."""
    answers = plain("plain_transformers.py", trained, trained.merged, stack.model, trained.adapter)
    assert answers == [trained.answers] * 2


def test_plain_vllm_answers_alike_to_the_token(trained: Trained) -> None:
    assert plain("plain_vllm.py", trained, trained.merged) == [trained.answers]


@pytest.mark.long  # plain transformers loads the adapter above, and plain vLLM the merged model
def test_plain_vllm_with_the_adapter_answers_alike_to_the_token(trained: Trained, stack: Stack) -> None:
    assert plain("plain_vllm.py", trained, stack.model, trained.adapter) == [trained.answers]


@contextmanager
def vllm_serve(folder: pathlib.Path, *options: str) -> Iterator[str]:
    """Runs a small `vllm serve FOLDER`; yields its address.

    The command itself asks for the version of a package named vllm, but the CPU build is named vllm-cpu.
    """
    (port,) = free_ports(1)
    small = ["--max-model-len", "512", "--max-num-seqs", "8", "--enforce-eager"]
    address = ["--host", "127.0.0.1", "--port", str(port)]
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        folder,
        *address,
        *small,
        *options,
    ]
    with subprocess.Popen(command, cwd=folder, env=strangers_environment()) as server:
        try:
            while True:
                try:
                    if httpx.get(f"http://127.0.0.1:{port}/health").is_success:
                        break
                except httpx.TransportError:
                    assert server.poll() is None, "vllm serve has ended"
                    time.sleep(0.5)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.terminate()


@pytest.mark.long
def test_plain_vllm_serve_answers_alike_to_the_token(trained: Trained) -> None:
    """Over HTTP, as in docs/guides/first-fine-tune.md."""
    answers = []
    with vllm_serve(trained.merged, "--served-model-name", "own") as base_url:
        client = openai.OpenAI(base_url=base_url, api_key="none")
        for picture, question in trained.asked:
            data = base64.b64encode(pathlib.Path(picture).read_bytes()).decode()
            content: Any = [
                {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
                {"type": "text", "text": question},
            ]
            answer = client.chat.completions.create(
                model="own",
                messages=[{"role": "user", "content": content}],
                temperature=0.0,
                max_completion_tokens=8,
                extra_body={"return_token_ids": True},
            )
            answers.append(answer.choices[0].model_dump()["token_ids"])
    assert answers == trained.answers


def test_exports_have_all_that_a_stranger_needs(trained: Trained, stack: Stack) -> None:
    of_base = {path.name for path in stack.model.iterdir()}
    assert {path.name for path in trained.merged.iterdir()} == {*of_base, "README.md"}
    own = {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    assert {path.name for path in trained.adapter.iterdir()} == {*of_base, *own} - {"model.safetensors"}


def test_the_command_exports_a_training_checkpoint(trained: Trained, stack: Stack, tmp_path: pathlib.Path) -> None:
    """Exports the weights of the last step in a new run; the test above checks the weights."""
    with stack.service_client() as service:
        training = service.create_training_client_from_state(trained.model.state).result()
        state = training.save_state("kept").result().path
        sampler = training.save_weights_for_sampler("kept").result().path
    of_command, of_function = tmp_path / "command", tmp_path / "function"
    environment = os.environ | {"TINKER_API_KEY": API_KEY, "TINKER_TELEMETRY": "0"}
    command = [FOVEA, "export", state, of_command, "--merged", "--base-url", stack.base_url]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout.strip()) == (0, f"written: {of_command}"), ran.stderr
    export_model(sampler, of_function, merged=True, base_url=stack.base_url, api_key=API_KEY)
    first, second = ((folder / "model.safetensors").read_bytes() for folder in (of_command, of_function))
    assert first == second


def test_full_parameters_are_exported_whole(trained: Trained, stack: Stack, tmp_path: pathlib.Path) -> None:
    with stack.service_client() as service:
        training = service.create_lora_training_client(base_model=stack.model_name, rank=0).result()
        path = training.save_weights_for_sampler("whole").result().path
    server: dict[str, Any] = {"base_url": stack.base_url, "api_key": API_KEY}
    with pytest.raises(InvalidInput, match="full parameters and no adapter"):
        export_model(path, tmp_path / "adapter", **server)
    folder = export_model(path, tmp_path / "merged", merged=True, **server)
    assert {path.name for path in folder.iterdir()} >= {"config.json", "tokenizer.json", "chat_template.jinja"}
    assert list(tmp_path.iterdir()) == [folder], "a refused export must leave nothing"


def test_an_export_into_its_own_folder_changes_nothing(trained: Trained) -> None:
    """So a finished program can run again."""
    for folder, merged in ((trained.adapter, False), (trained.merged, True)):
        before = {file: file.stat().st_mtime_ns for file in folder.iterdir()}
        assert trained.model.export(folder, merged=merged) == folder
        assert {file: file.stat().st_mtime_ns for file in folder.iterdir()} == before
        assert f"ask with the same:\n\n    {QUESTION}\n" in (folder / "README.md").read_text()


def test_refusals_name_what_is_wrong(trained: Trained, stack: Stack, tmp_path: pathlib.Path) -> None:
    server: dict[str, Any] = {"base_url": stack.base_url, "api_key": API_KEY}
    with pytest.raises(AlreadyExists, match="already has files"):
        export_model(trained.model.weights, trained.merged, **server)
    with pytest.raises(AlreadyExists, match="already has files"):
        export_model(trained.model.weights, trained.adapter, merged=True, **server)
    with pytest.raises(AlreadyExists, match="already has files"):
        export_model(trained.model.state, trained.adapter, **server)
    with pytest.raises(InvalidInput, match="is not a checkpoint path"):
        export_model("somewhere", tmp_path / "out", **server)
    with pytest.raises(NotFound, match="does not exist, or this server does not hand out weights"):
        export_model("tinker://nothing/sampler_weights/x", tmp_path / "out", **server)
    with pytest.raises(NotFound, match=r"the base model 'nobody/nothing' is not a directory here.*as base \(--base\)"):
        export_model(trained.model.weights, tmp_path / "out", base="nobody/nothing", **server)
    assert list(tmp_path.iterdir()) == []
