"""Uploads of adapters: started, sent to signed links, validated, finished. Errors leave no files."""

import asyncio
import json
import pathlib
import struct
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save

from fovea.wire.errors import InvalidInput
from fovea_gateway.access.api_keys import Scope, hash_key, nameless
from fovea_gateway.access.audit_log import question_of
from tests.contract.gateway.conftest import KEY, Stand, running
from tests.contract.gateway.fakes import MODEL
from tests.contract.gateway.keeping import KeepingTrainer
from tests.contract.gateway.requests import Rest
from tests.contract.gateway.test_exports import OTHER_KEY, stored

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
RANK = 4
PEFT = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "bias": "none", "target_modules": ["q_proj"]}
MODULE = "base_model.model.model.layers.0.self_attn.q_proj"
TENSORS = {f"{MODULE}.lora_A.weight": torch.ones(RANK, 8), f"{MODULE}.lora_B.weight": torch.ones(8, RANK)}
ABSENT: Any = object()


@pytest.fixture(params=["local", "memory", "s3"])
async def stand(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> AsyncIterator[Stand]:
    """A stand that stores uploads in a local folder or another fsspec file system."""
    root = str(tmp_path / "kept")
    if request.param != "local":
        root = "memory:/" if request.param == "memory" else request.getfixturevalue("new_bucket")()
        root += f"/kept-{uuid.uuid4().hex}"
    stand = Stand(tmp_path)
    stand.trainer = KeepingTrainer(lambda: stand.samplers)
    keys = [KEY, OTHER_KEY]
    async with running(stand, checkpoint_dir=root, base_path="/base", api_key=keys, max_upload_bytes=4096):
        yield stand


@pytest.fixture
async def client(stand: Stand) -> AsyncIterator[Rest]:
    async with stand.http() as http:
        yield Rest(http)


async def start(client: Rest, **lora: Any) -> dict[str, Any]:
    return await client.ok("external_weights_upload_start", base_model=MODEL, lora_config={"rank": RANK, **lora})


async def put(url: str, content: bytes) -> httpx.Response:
    """Uploads a file as the SDK does, without a key."""
    async with httpx.AsyncClient(timeout=60) as anybody:
        return await anybody.put(url, content=content)


async def send(begun: dict[str, Any], config: dict[str, Any] | bytes = PEFT, weights: bytes | None = None) -> None:
    files = {
        CONFIG: config if isinstance(config, bytes) else json.dumps(config).encode(),
        WEIGHTS: save(TENSORS) if weights is None else weights,
    }
    for name, content in files.items():
        answer = await put(begun["urls"][name], content)
        assert answer.status_code == 200, answer.text


async def finish(client: Rest, upload_id: str) -> httpx.Response:
    return await client.post("external_weights_upload_finish", upload_id=upload_id)


async def test_an_adapter_becomes_external_weights_that_are_loaded(stand: Stand, client: Rest) -> None:
    begun = await start(client, train_mlp=False)
    assert sorted(begun["urls"]) == [CONFIG, WEIGHTS]
    assert all(url.startswith(f"http://127.0.0.1:{stand.port}/base/api/v1/uploads/") for url in begun["urls"].values())
    await send(begun)
    await send(begun)  # again, which replaces the first upload
    path = (await finish(client, begun["upload_id"])).json()["tinker_path"]
    assert path == f"tinker://{begun['upload_id']}/external_weights/uploaded"
    assert (await finish(client, begun["upload_id"])).json()["tinker_path"] == path, (
        "a client that lost the answer asks again"
    )
    assert [name.rpartition("/")[2] for name in stored(stand)] == [CONFIG, WEIGHTS]
    listed = (await client.http.get("checkpoints")).json()["checkpoints"]
    assert [(one["tinker_path"], one["checkpoint_type"], one["base_model"]) for one in listed] == [
        (path, "external", MODEL)
    ]
    info = await client.ok("weights_info", tinker_path=path)
    assert (info["lora_rank"], info["train_mlp"], info["train_attn"]) == (RANK, False, True)
    links_at = f"training_runs/{begun['upload_id']}/checkpoints/external_weights/uploaded/external_weights_urls"
    links = (await client.http.get(links_at)).json()["urls"]
    assert (await client.http.get(links[WEIGHTS])).content == save(TENSORS)
    await stand.stop()
    await stand.start()
    async with stand.http() as http:
        again = Rest(http)
        await again.open_session()
        body = {"session_id": again.session_id, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": RANK}}
        created = await again.ok("create_model", **body)
        await again.result(created["request_id"])
        load = {"model_id": created["model_id"], "seq_id": 1, "path": path}
        refused = await again.result((await again.ok("load_weights", **load, optimizer=True))["request_id"])
        assert "no optimizer state" in refused["error"]
        refused = await again.result(
            (await again.ok("load_weights", **load | {"seq_id": 2}, optimizer=False))["request_id"]
        )
        assert "other settings" in refused["error"], "its alpha must be the file's"
    assert stand.gateway is not None
    question = question_of({"event": "checkpoint_upload", "outcome": "ok"}, 1)
    found = [each["event_details"] for each in await stand.gateway.components.audit.page(question, 10, 0)]
    assert {each["object_id"].rpartition("/")[2] for each in found} == {CONFIG, WEIGHTS}
    assert {each["key_id"] for each in found} == {nameless(hash_key(KEY)).removeprefix("key-")}


async def test_the_trainer_compares_the_header_before_the_adapter_becomes_a_checkpoint(
    stand: Stand, client: Rest
) -> None:
    wrong = f"{MODULE}.lora_A.weight with shape [4, 8], but the model needs [4, 64]"
    begun = await start(client)
    await send(begun)
    stand.trainer.failures["CheckAdapter"] = [InvalidInput(f"{WEIGHTS} has {wrong}", field="uri")]
    answer = await finish(client, begun["upload_id"])
    assert (answer.status_code, answer.json().get("field")) == (400, "upload_id"), answer.text
    assert wrong in answer.json()["detail"]
    (asked,) = [request for name, request in stand.trainer.calls if name == "CheckAdapter"]
    assert (asked.lora.rank, asked.lora.alpha) == (RANK, PEFT["lora_alpha"])
    assert asked.uri.endswith(begun["upload_id"])
    assert (await client.http.get("checkpoints")).json()["checkpoints"] == []
    assert (await finish(client, begun["upload_id"])).status_code == 200, "the client may send it again"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (b"{", "is not JSON"),
        (b"[]", "is not a JSON object"),
        (b"[" * 9999, "is not JSON"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"r": 8}, "r is 8; lora_config.rank of the upload is 4"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"use_dora": True}, "use_dora is True"),
        ({"use_rslora": True}, "use_rslora is True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"alpha_pattern": {"q": 1}}, "alpha_pattern"),
        ({"lora_alpha": 0}, "lora_alpha is 0"),
        ({"lora_alpha": ABSENT}, "lora_alpha is None"),
    ],
)
async def test_a_config_that_would_be_computed_otherwise_is_named(client: Rest, config: Any, words: str) -> None:
    begun = await start(client)
    if isinstance(config, dict):
        config = {name: value for name, value in (PEFT | config).items() if value is not ABSENT}
    await send(begun, config)
    refused = await finish(client, begun["upload_id"])
    assert (refused.status_code, refused.json()["field"]) == (400, "upload_id")
    assert CONFIG in refused.json()["detail"]
    assert words in refused.json()["detail"]
    await send(begun)
    assert (await finish(client, begun["upload_id"])).status_code == 200, "the file may be sent again"


def edited(header: dict[str, Any]) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(256)


A, B = TENSORS
WHOLE = {"dtype": "F32", "shape": [RANK, 8], "data_offsets": [0, 128]}
HALF = WHOLE | {"shape": [8, RANK], "data_offsets": [128, 256]}


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (b"", "not a safetensors file"),
        (b"\xff" * 64, "not a safetensors file"),
        (struct.pack("<Q", 2) + b"[]", "is not a JSON object"),
        (edited({"__metadata__": {}}), "has no tensors"),
        (edited({A: WHOLE}), f"has no {B} beside it"),
        (edited({"weight": WHOLE}), "is not a LoRA factor"),
        (edited({A: WHOLE | {"dtype": "I8"}, B: HALF}), "has type I8"),
        (edited({A: WHOLE, B: HALF | {"shape": [4, 8]}}), "does not match rank 4"),
        (edited({A: WHOLE, B: HALF | {"data_offsets": [192, 320]}}), "the file is incomplete"),
        (edited({A: WHOLE, B: HALF | {"data_offsets": [128, 192]}}), "a size that does not match its shape"),
        (edited({A: WHOLE, B: HALF | {"shape": [8.5, 4]}}), "damaged header"),
        (edited({A: WHOLE, B: {}}), "damaged header"),
    ],
)
async def test_a_file_of_weights_that_is_not_sound_is_named(client: Rest, weights: bytes, words: str) -> None:
    begun = await start(client)
    await send(begun, weights=weights)
    refused = await finish(client, begun["upload_id"])
    assert refused.status_code == 400, refused.text
    assert words in refused.json()["detail"]


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b'{"x":[' + b"[]," * 5_000_000 + b"[]]}", "1048576"),
        (b'{"x":[' + b"[]," * 300_000 + b"[]]}", "600"),
        (b'{"x":' + b"[" * 100_000, "is not JSON"),
    ],
    ids=["16 MB", "many elements", "deep"],
)
async def test_a_header_is_bounded_before_it_is_parsed(stand: Stand, header: bytes, words: str) -> None:
    """A header of 16 MiB took 8.9 s of the event loop and 800 MiB each time."""
    await stand.stop()
    await stand.start(max_upload_bytes=32 * 2**20)
    async with stand.http() as http:
        client = Rest(http)
        begun = await start(client)
        await send(begun, weights=struct.pack("<Q", len(header)) + header)
        refused = await finish(client, begun["upload_id"])
    assert refused.status_code in (400, 413), refused.text
    assert refused.json()["field"] == "upload_id"
    assert f"header of {WEIGHTS}" in refused.json()["detail"]
    assert words in refused.json()["detail"]


async def test_what_is_above_the_limit_is_refused_and_not_kept(stand: Stand, client: Rest) -> None:
    begun = await start(client)
    refused = await put(begun["urls"][WEIGHTS], bytes(4097))
    assert (refused.status_code, "4096" in refused.json()["detail"]) == (413, True)

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(5):
            yield bytes(1024)

    async with httpx.AsyncClient(timeout=60) as anybody:
        refused = await anybody.put(begun["urls"][WEIGHTS], content=pieces())  # without a declared length
    assert refused.status_code == 413
    assert [name.rpartition("/")[2] for name in stored(stand)] == ["fovea_upload.json"]
    refused = await finish(client, begun["upload_id"])
    assert (refused.status_code, "has not been sent yet" in refused.json()["detail"]) == (400, True)


async def test_a_client_that_goes_away_leaves_no_half_file(stand: Stand, client: Rest) -> None:
    begun = await start(client)

    async def pieces() -> AsyncIterator[bytes]:
        yield bytes(16)
        raise ConnectionError("gone")

    async with httpx.AsyncClient(timeout=60) as anybody:
        with pytest.raises(ConnectionError):
            await anybody.put(begun["urls"][WEIGHTS], content=pieces())
    for _ in range(50):
        if [name.rpartition("/")[2] for name in stored(stand)] == ["fovea_upload.json"]:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(stored(stand))


async def test_links_and_uploads_are_their_owners(stand: Stand, client: Rest) -> None:
    begun = await start(client)
    url = begun["urls"][CONFIG]
    other_end = url[:-1] + ("0" if url[-1] != "0" else "1")
    for wrong in (url.replace(CONFIG, WEIGHTS), other_end, url.replace("expires=1", "expires=2")):
        assert (await put(wrong, b"{}")).status_code == 403, wrong
    assert (await put(url.partition("?")[0], b"{}")).status_code == 400
    await send(begun)
    async with stand.http(OTHER_KEY) as http:
        assert (await finish(Rest(http), begun["upload_id"])).status_code == 404
    for name in ("upload-1-a", "../x", ""):
        assert (await finish(client, name)).status_code == 404
    assert (await finish(client, begun["upload_id"])).status_code == 200
    assert (await put(url, b"{}")).status_code == 403, "a checkpoint must not change"
    async with stand.http(OTHER_KEY) as http:
        assert (await finish(Rest(http), begun["upload_id"])).status_code == 404


async def test_wrong_beginnings_are_named(client: Rest) -> None:
    whole = {"base_model": MODEL, "lora_config": {"rank": 4}}
    for body, status, field in (
        ({"base_model": "nobody", "lora_config": {"rank": 4}}, 404, "base_model"),
        ({"base_model": MODEL, "lora_config": {"rank": 0}}, 400, "lora_config"),
        ({**whole, "destination_project_id": "p"}, 400, "destination_project_id"),
    ):
        refused = await client.post("external_weights_upload_start", **body)
        assert (refused.status_code, refused.json()["field"]) == (status, field), refused.text


async def test_uploads_that_were_not_finished_in_time_are_removed(
    stand: Stand, client: Rest, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stand.gateway is not None
    kept, left = await start(client), await start(client)
    await send(kept)
    path = (await finish(client, kept["upload_id"])).json()["tinker_path"]
    now = time.time()
    monkeypatch.setattr("fovea_gateway.checkpoints.uploads.time.time", lambda: now + 3601)
    assert (await put(left["urls"][CONFIG], b"{}")).status_code == 403
    assert (await finish(client, left["upload_id"])).status_code == 404
    monkeypatch.setattr("fovea_gateway.checkpoints.uploads.time.time", lambda: now + 7300)
    await stand.gateway.components.uploads.remove_expired()
    folder = kept["upload_id"]
    assert [name.split("/")[-2:] for name in stored(stand)] == [[folder, CONFIG], [folder, WEIGHTS]]
    monkeypatch.undo()
    assert (await client.http.get("checkpoints")).json()["checkpoints"][0]["tinker_path"] == path


async def test_a_link_ends_with_the_key_that_asked_for_it(stand: Stand) -> None:
    assert stand.gateway is not None
    keys = stand.gateway.components.keys
    text, key = await keys.create("carol", "", Scope.TRAIN, None)
    reading, reader = await keys.create("carol", "", Scope.READ, None)
    async with stand.http(text) as http, stand.http(reading) as read_only:
        client = Rest(http)
        begun = await start(client)
        await send(begun)
        path = (await finish(client, begun["upload_id"])).json()["tinker_path"]
        again = await start(client)
        links_at = f"training_runs/{path.split('/')[2]}/checkpoints/external_weights/uploaded/external_weights_urls"
        own = (await http.get(links_at)).json()["urls"][WEIGHTS]
        others = (await read_only.get(links_at)).json()["urls"][WEIGHTS]
        assert [(await http.get(url)).status_code for url in (own, others)] == [200, 200]
        await keys.revoke(key.key_id)
        assert (await put(again["urls"][WEIGHTS], save(TENSORS))).status_code == 403
        assert [(await http.get(url)).status_code for url in (own, others)] == [403, 200]
        renamed = own.replace(key.key_id, reader.key_id)
        assert (await http.get(renamed)).status_code == 403, "the signature must cover the key"
