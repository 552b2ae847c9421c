"""Section G: the SDK's command line in subprocesses, and downloads."""

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import tinker
import torch
from peft import PeftConfig, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from fovea_conformance.adapters import ADAPTER, download
from fovea_conformance.check import check, expect
from fovea_conformance.checks.checkpoints import checkpoint_of, known
from fovea_conformance.gradients import logprobs_of, warmed_up
from fovea_conformance.target import Target, unique_name

_HOUR_S = 3600
_COMMAND_S = 90.0
_AGE_HEADER = b"age-encryption.org/v1"
_LOADED_TOLERANCE = 0.02


def environment(target: Target, home: str) -> dict[str, str]:
    """Returns environment variables with the server, and without the user's own credentials."""
    given = {"TINKER_BASE_URL": target.options.base_url, "TINKER_API_KEY": target.options.api_key, "HOME": home}
    return os.environ | given | {"TINKER_TELEMETRY": "0", "COLUMNS": "400"}


def command(target: Target, home: str, *words: str) -> str:
    """Runs `tinker ...`; returns its output. Raises Failed unless the exit code is 0."""
    done = subprocess.run(
        [sys.executable, "-m", "tinker.cli", *words],
        env=environment(target, home), cwd=home, capture_output=True, text=True, timeout=_COMMAND_S, check=False,
    )  # fmt: skip
    said = (done.stderr or done.stdout).strip()[-300:]
    expect(done.returncode == 0, f"`tinker {' '.join(words)}` exits with {done.returncode}: {said}")
    return done.stdout


@check(
    "C113",
    "CLI: run list, run info, checkpoint list, info, set-ttl, delete, model list, auth status exit 0",
    timeout_s=300,
)
def c113_cli(target: Target) -> str:
    """Runs each command in its own process, searches its output, and checks its effect over REST."""
    training = target.training(rank=4, user_metadata={"note": "cli"})
    path = training.save_state(unique_name("state"), ttl_seconds=_HOUR_S).result(120).path
    rest = target.rest()
    shows: list[tuple[list[str], str]] = [
        (["auth", "status"], "Tinker accessible: yes"),
        (["model", "list"], target.model),
        (["run", "list", "--limit", "3"], "training_run_id"),
        (["run", "info", training.model_id], target.model),
        (["checkpoint", "list", "--run-id", training.model_id], path),
        (["checkpoint", "info", path], path),
    ]
    with tempfile.TemporaryDirectory() as home, ThreadPoolExecutor(4) as pool:

        def expect_shown(case: tuple[list[str], str]) -> None:
            words, wanted = case
            shown = command(target, home, "--format", "json", *words)
            expect(wanted in _unescaped(shown), f"`tinker {' '.join(words)}` does not show {wanted!r}: {shown[:200]}")

        list(pool.map(expect_shown, shows))
        command(target, home, "checkpoint", "set-ttl", path, "--remove")
        expect(known(rest, path).expires_at is None, "set-ttl --remove did not remove the expiry")
        command(target, home, "checkpoint", "delete", "--yes", path)
    expect(checkpoint_of(rest, path) is None, "checkpoint delete exits with 0, but the checkpoint is still listed")
    return f"{len(shows) + 2} commands exit with 0; they show and do what they should"


def _unescaped(text: str) -> str:
    try:
        return json.dumps(json.loads(text), ensure_ascii=False)
    except json.JSONDecodeError:
        return text


@check("C114", "CLI checkpoint download of a training checkpoint yields a loadable PEFT adapter; export deleted")
def c114_download(target: Target) -> str:
    """Reads the files as PEFT does.

    If the base model's name is a local folder, PEFT loads the adapter on it and must reproduce the trainer's logprobs.
    No export may be left afterwards.
    """
    data = [target.datum(12)]
    training = warmed_up(target.training(), data)
    path = training.save_state(unique_name("state"), ttl_seconds=_HOUR_S).result(120).path
    rest = target.rest()
    before = _exports(rest)
    with tempfile.TemporaryDirectory() as home:
        told = json.loads(command(target, home, "--format", "json", "checkpoint", "download", path, "-o", home))
        folder = Path(told["destination"])
        seen = _read_adapter(folder, rank=8)
        if Path(target.checkpoint).is_dir():
            trained = logprobs_of(training.forward(data, "cross_entropy").result(120))[0]
            loaded = _logprobs_with(target.checkpoint, folder, target.tokens(13))
            off = float(np.max(np.abs(loaded - trained)))
            expect(off <= _LOADED_TOLERANCE, f"PEFT's model is off the trainer's logprobs by {off:.3g}")
            seen += f"; PEFT's logprobs within {off:.1e} of the trainer's"
    left = _exports(rest) - before
    expect(not left, f"the temporary export is still listed: {sorted(left)}")
    return f"{seen}; no export left"


def _exports(rest: tinker.RestClient) -> set[str]:
    """Returns the listed exports with the names that the CLI and the cookbook give to temporary ones."""
    listed = rest.list_user_checkpoints(limit=1000).result(60).checkpoints
    ours = [one for one in listed if one.checkpoint_type == "external"]
    return {one.tinker_path for one in ours if one.tinker_path.endswith("/download")}


def _read_adapter(folder: Path, rank: int) -> str:
    config: Any = PeftConfig.from_pretrained(str(folder))
    expect(str(config.peft_type).endswith("LORA"), f"adapter_config.json has peft_type {config.peft_type}")
    expect(config.r == rank, f"adapter_config.json has rank {config.r}, expected {rank}")
    tensors = load_file(folder / ADAPTER)
    first = {name.replace("lora_A", "lora_B") for name in tensors if "lora_A" in name}
    second = {name for name in tensors if "lora_B" in name}
    expect(bool(first) and first == second, f"{ADAPTER}: A and B matrices do not pair up")
    ranks = {one.shape[0 if "lora_A" in name else 1] for name, one in tensors.items()}
    expect(ranks == {rank}, f"{ADAPTER}: matrices of ranks {sorted(ranks)}, expected {rank}")
    moved = any(bool(one.abs().max() > 0) for name, one in tensors.items() if "lora_B" in name)
    expect(moved, f"{ADAPTER}: all B matrices are zero after a step")
    return f"{len(first)} pairs of rank {rank}"


def _logprobs_with(base_model: str, folder: Path, tokens: list[int]) -> Any:
    """Returns the logprobs of transformers and PEFT with the downloaded adapter, float64 [N - 1]."""
    loaded: Any
    try:
        loaded = AutoModelForImageTextToText.from_pretrained(base_model, dtype=torch.float32)
    except ValueError:
        loaded = AutoModelForCausalLM.from_pretrained(base_model, dtype=torch.float32)
    model: Any = PeftModel.from_pretrained(loaded, str(folder)).eval()
    ids = torch.tensor([tokens])
    with torch.no_grad():
        scores = model(input_ids=ids[:, :-1]).logits[0].double().log_softmax(-1)
    return scores.gather(1, ids[0, 1:, None])[:, 0].numpy()


@check("C115", "Cookbook 0.6.1 weights.download (age-encrypted) works or fails with a clear message")
def c115_encrypted(target: Target) -> str:
    """Makes the cookbook's calls one by one.

    An export to one x25519 recipient must have encrypted files that end in .age and open with the identity. A malformed
    recipient must be refused by an error that names it.
    """
    import pyrage

    service = target.service()
    rest = target.rest()
    data = [target.datum(12)]
    trained = warmed_up(target.training(service), data)
    path = trained.save_state(unique_name("state"), ttl_seconds=_HOUR_S).result(120).path
    loaded = service.create_training_client_from_state(path).result(120)
    identity = pyrage.x25519.Identity.generate()
    recipients = [str(identity.to_public())]
    try:
        export = loaded.save_weights_external("download", _HOUR_S, recipients).result(120).path
    except tinker.RequestFailedError as error:
        user = error.category == tinker.types.RequestErrorCategory.User
        expect(user and "age" in str(error).lower(), f"the refusal does not say that age is not served: {error}")
        return f"refused with a clear message: {error}"
    rest.set_checkpoint_ttl_from_tinker_path(export, _HOUR_S).result(60)
    files = download(rest, export)
    plain = {name for name, content in files.items() if not (name.endswith(".age") and content.startswith(_AGE_HEADER))}
    expect(not plain, f"not encrypted, or not named .age: {sorted(plain)}")
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            (Path(folder) / name.removesuffix(".age")).write_bytes(pyrage.decrypt(content, [identity]))
        seen = _read_adapter(Path(folder), rank=8)
    rest.delete_checkpoint_from_tinker_path(export).result(60)
    expect(export not in _exports(rest), "the export is still listed after its deletion")
    try:
        loaded.save_weights_external(unique_name("bad"), _HOUR_S, ["age1nonsense"]).result(60)
    except tinker.RequestFailedError as error:
        expect("recipient" in str(error).lower(), f"a bad recipient is refused without naming it: {error}")
        return f"{len(files)} files encrypted, opened: {seen}; a bad recipient is refused"
    expect(False, "a recipient that is none was accepted")
    return ""
