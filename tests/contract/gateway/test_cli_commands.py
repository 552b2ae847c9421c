"""`fovea` commands that query a running gateway: checkpoints over REST, and the figures of `fovea status`."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

from fovea.cli.main import app
from fovea.cli.status_report import read_report, summary
from tests.contract.gateway.conftest import Stand, running
from tests.contract.gateway.fakes import MODEL
from tests.contract.gateway.requests import Rest


async def invoke(stand: Stand, *arguments: str, key: str = "tml-local", answer: str = "") -> Result:
    """Runs `fovea` in a thread: it blocks, and the gateway runs in this loop."""
    command = [*arguments, "--base-url", stand.url, "--api-key", key]
    return await asyncio.to_thread(CliRunner().invoke, app, command, input=answer)


async def saved(rest: Rest) -> list[str]:
    """Saves one checkpoint of each kind."""
    model_id = await rest.create_model()
    paths = []
    for seq_id, kind in enumerate(("save_weights", "save_weights_for_sampler"), start=1):
        begun = await rest.ok(kind, model_id=model_id, seq_id=seq_id, path="kept")
        paths.append((await rest.result(begun["request_id"]))["path"])
    return paths


async def test_checkpoints_are_listed_shown_and_deleted(stand: Stand, rest: Rest) -> None:
    state, weights = await saved(rest)
    listed = await invoke(stand, "checkpoints", "list")
    assert {line.split()[-1] for line in listed.output.splitlines()} == {state, weights}
    lines = (await invoke(stand, "checkpoints", "list", "--json")).output.splitlines()
    assert {json.loads(line)["checkpoint_type"] for line in lines} == {"training", "sampler"}
    shown = json.loads((await invoke(stand, "checkpoints", "show", state)).output)
    assert (shown["tinker_path"], shown["is_lora"]) == (state, True)
    kept = await invoke(stand, "checkpoints", "delete", state, answer="n\n")
    assert kept.exit_code != 0
    deleted = await invoke(stand, "checkpoints", "delete", state, "--yes")
    assert deleted.output == f"deleted {state}\n"
    left = await invoke(stand, "checkpoints", "list")
    assert [line.split()[-1] for line in left.output.splitlines()] == [weights]


async def test_checkpoints_are_listed_with_the_names_of_their_runs(stand: Stand, rest: Rest) -> None:
    named = await rest.create_model(1, user_metadata={"name": "shapes-run"})
    saving = await rest.ok("save_weights", model_id=named, seq_id=1, path="kept")
    path = (await rest.result(saving["request_id"]))["path"]
    nameless, _ = await saved(rest)
    lines = [line.split() for line in (await invoke(stand, "checkpoints", "list")).output.splitlines()]
    assert {line[-1]: line[-2] for line in lines if line[-1] in (path, nameless)} == {
        path: "shapes-run", nameless: "expiry"
    }  # fmt: skip


async def test_what_is_refused_is_said_in_the_gateways_words(stand: Stand, rest: Rest) -> None:
    state, _ = await saved(rest)
    others = await invoke(stand, "checkpoints", "list", key="tml-other")
    assert (others.exit_code, len(others.output.splitlines())) == (1, 1)
    gone = await invoke(stand, "checkpoints", "delete", state.replace("kept", "nothing"), "--yes")
    assert gone.exit_code == 1
    assert "nothing" in gone.output
    odd = await invoke(stand, "checkpoints", "show", "weights/kept")
    assert odd.exit_code == 2
    assert "not have the form" in " ".join(odd.output.split())
    stand_down = await asyncio.to_thread(
        CliRunner().invoke, app, ["checkpoints", "list", "--base-url", "http://127.0.0.1:1"]
    )
    assert stand_down.output.startswith("--base-url: no server responds at http://127.0.0.1:1 (")


async def test_an_adapter_is_uploaded(stand: Stand, tmp_path: Path) -> None:
    empty = await invoke(stand, "checkpoints", "upload", str(tmp_path))
    assert (empty.exit_code, "adapter_config.json" in " ".join(empty.output.split())) == (2, True)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 16, "base_model_name_or_path": "somebody/elsewhere"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    factor = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    tensors = {factor.format("A"): torch.ones(4, 8), factor.format("B"): torch.ones(8, 4)}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    done = await invoke(stand, "checkpoints", "upload", str(tmp_path))
    assert done.exit_code == 0, done.output
    path = done.stdout.strip()
    assert f"as an adapter of {MODEL}" in done.stderr  # the only model that is served
    shown = json.loads((await invoke(stand, "checkpoints", "show", path)).output)
    assert (shown["lora_rank"], shown["base_model"]) == (4, MODEL)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    refused = await invoke(stand, "checkpoints", "upload", str(tmp_path))
    assert (refused.exit_code, "use_dora is True" in refused.stderr) == (1, True)
    (tmp_path / "adapter_config.json").write_text("[]")
    odd = await invoke(stand, "checkpoints", "upload", str(tmp_path))
    assert (odd.exit_code, "has no valid rank" in " ".join(odd.output.split())) == (2, True)


async def test_an_adapter_that_is_too_large_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 16}))
    (tmp_path / "adapter_model.safetensors").write_bytes(bytes(50 * 2**20))
    async with running(Stand(tmp_path), max_upload_bytes=2**20) as stand:
        refused = await invoke(stand, "checkpoints", "upload", str(tmp_path))
    assert refused.exit_code == 1
    assert (
        refused.stderr.splitlines()[-1]
        == "adapter_model.safetensors is larger than 1048576 bytes, this gateway's limit for uploads"
    )


async def test_status_counts_sessions_and_what_waits(tmp_path: Path) -> None:
    async with running(Stand(tmp_path), metrics_port=0) as stand, stand.http() as http:
        assert stand.gateway is not None
        rest = Rest(http)
        await rest.open_session()
        url = f"http://127.0.0.1:{stand.gateway.grpc._metrics_port}/metrics"
        item = {"metrics": url, "pid": os.getpid(), "address": "", "started_at": 0.0, "restarts": 0, "last_end": ""}
        state: dict[str, Any] = {
            "version": "1.2.3", "started_at": 0.0, "base_url": stand.url, "model_name": "m", "further_models": {},
            "services": {"gateway": item, "trainer": item | {"metrics": "http://127.0.0.1:1/"}},
        }  # fmt: skip

        async def report() -> dict[str, Any]:
            return await asyncio.to_thread(read_report, state, {"gateway": True, "trainer": False})

        for _ in range(100):  # gauges are set every two seconds
            found = await report()
            if found["sessions"]:
                break
            await asyncio.sleep(0.1)
        assert (found["sessions"], found["waiting"], found["running"]) == (1, 0, 0)
        assert found["models"] is None, "the trainer does not answer"
        assert found["services"]["gateway"]["memory_bytes"] > 2**20
        assert "1 sessions, ? models in training, 0 requests run, 0 wait" in summary(found)
