"""Limits of stored client data: text size, rows of each owner, and age."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from fovea_gateway.access import kept_rows
from fovea_gateway.access.owners import Owner
from fovea_gateway.checkpoints import checkpoint_routes
from fovea_gateway.checkpoints.checkpoint_registry import Search
from tests.contract.gateway.conftest import Stand, running
from tests.contract.gateway.fakes import MODEL
from tests.contract.gateway.keeping import KeepingTrainer
from tests.contract.gateway.requests import Rest
from tests.waiting import eventually

ALICE, BOB = "tml-alice", "tml-bob"
LONG = "x" * 250_000


@pytest.fixture
async def stand(tmp_path: Path, database_url: str) -> AsyncIterator[Stand]:
    stand = Stand(tmp_path)
    stand.trainer = KeepingTrainer(lambda: stand.samplers)
    settings: dict[str, Any] = {"api_key": [f"alice={ALICE}", f"bob={BOB}"], "max_row_bytes": 64 * 1024}
    async with running(stand, database_url=database_url, **settings) as stand:
        yield stand


@pytest.fixture
async def alice(stand: Stand) -> AsyncIterator[Rest]:
    async with stand.http(ALICE) as http:
        yield Rest(http)


@pytest.fixture
async def bob(stand: Stand) -> AsyncIterator[Rest]:
    async with stand.http(BOB) as http:
        yield Rest(http)


async def sweep(stand: Stand) -> None:
    assert stand.gateway is not None
    await stand.gateway.components.kept_rows.sweep()


async def end_session(rest: Rest) -> str:
    """Ends the session and waits until its resources are free; returns its id."""
    await rest.ok(f"sessions/{rest.session_id}/finish", reason={"type": "success"})
    return rest.session_id


async def save(rest: Rest, model_id: str, seq_id: int, name: str, **more: Any) -> dict[str, Any]:
    answer = await rest.ok("save_weights", model_id=model_id, seq_id=seq_id, path=name, **more)
    return await rest.result(answer["request_id"])


async def test_all_texts_have_one_limit(alice: Rest) -> None:
    refused = await alice.post("create_session", display_name=LONG)
    assert (refused.status_code, "display_name has 250002 bytes" in refused.text) == (400, True)
    model_id = await alice.create_model()
    metadata = {f"k{i}": LONG[:60_000] for i in range(4)}
    assert "user_metadata has" in (await save(alice, model_id, 1, "a", user_metadata=metadata))["error"]
    body = {"session_id": alice.session_id, "model_seq_id": 1, "base_model": MODEL, "lora_config": {"rank": 1}}
    assert (await alice.post("create_model", **body, user_metadata=metadata)).status_code == 400
    told = await alice.post(f"sessions/{alice.session_id}/finish", reason={"type": "success"}, detail=LONG)
    assert (told.status_code, "detail has" in told.text) == (400, True)


async def test_an_error_repeats_no_long_path(stand: Stand, alice: Rest) -> None:
    answer = await alice.post("weights_info", tinker_path=LONG)
    assert answer.status_code == 400
    assert len(answer.content) < 1000


async def test_one_owner_fills_its_share_of_rows_alone_and_what_is_over_makes_room(
    stand: Stand, alice: Rest, bob: Rest, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def open_until_refused(rest: Rest) -> tuple[int, httpx.Response]:
        for count in range(64):
            answer = await rest.post("create_session", display_name="n" * 1000)
            if answer.status_code != 200:
                return count, answer
            rest.session_id = answer.json()["session_id"]
            await end_session(rest)
        raise AssertionError("no request was refused")

    count, answer = await open_until_refused(bob)
    assert (count, answer.status_code, "max_row_bytes" in answer.text) == (16, 429, True)
    model_id = await alice.create_model()
    assert "error" not in await save(alice, model_id, 1, "a")
    await sweep(stand)
    assert (await bob.post("create_session")).status_code == 429, "a session that has just ended is kept for a while"
    monkeypatch.setattr(kept_rows, "_FRESH_S", 0.0)
    await sweep(stand)
    assert (await bob.post("create_session")).status_code == 200
    await stand.stop()
    await stand.start()
    assert "error" not in await save(alice, model_id, 2, "b"), "another owner's rows must stay"


async def test_ended_objects_expire_unless_they_have_a_checkpoint(stand: Stand, alice: Rest) -> None:
    assert stand.gateway is not None
    kept = await alice.create_model()
    path = (await save(alice, kept, 1, "a"))["path"]
    session = await end_session(alice)
    await alice.open_session()
    gone = await alice.create_model()
    await alice.snapshot(gone, 1)
    over = await end_session(alice)
    lora = {"rank": 999, "train_unembed": True, "train_mlp": True, "train_attn": True}
    await alice.open_session()
    body = {"session_id": alice.session_id, "model_seq_id": 7, "base_model": MODEL, "lora_config": lora}
    answer = await alice.ok("create_model", **body, user_metadata={"note": "n" * 10_000})
    assert "lora_config.rank is 999" in (await alice.result(answer["request_id"]))["error"]
    failed = f"{alice.session_id}:train:7"
    run = (await alice.http.get(f"training_runs/{failed}")).json()
    assert (run["corrupted"], run["user_metadata"]) == (True, {}), "the text of a failed request is dropped at once"
    await sweep(stand)
    assert (await alice.http.get(f"training_runs/{gone}")).status_code == 200
    await eventually(lambda: not stand.trainer.models)
    await asyncio.sleep(0.02)
    await stand.stop()
    await stand.start(ended_ttl_s=0.01)
    await sweep(stand)

    async def found(*ids: str) -> list[int]:
        return [(await alice.http.get(f"training_runs/{each}")).status_code for each in ids]

    assert await found(kept, gone, failed) == [200, 404, 404]
    statuses = [(await alice.http.get(f"sessions/{each}")).status_code for each in (session, over, alice.session_id)]
    assert statuses == [200, 404, 200], "an open session must stay"
    await alice.http.delete(f"training_runs/{path.removeprefix('tinker://').replace('/', '/checkpoints/', 1)}")
    await sweep(stand)
    assert await found(kept) == [404]
    assert not [name for name in await asyncio.to_thread(os.listdir, stand.state_dir / "checkpoints") if "sess" in name]


async def test_a_search_reads_no_more_rows_than_it_answers(
    stand: Stand, alice: Rest, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stand.gateway is not None
    model_id = await alice.create_model()
    for seq_id in range(1, 10):
        await save(alice, model_id, seq_id, f"c{seq_id}", user_metadata={"odd": str(seq_id % 2)})
    checkpoints = stand.gateway.components.checkpoints
    first = await checkpoints.search(Search("alice", limit=2))
    assert [each.name for each in first] == ["c9", "c8"]
    then = await checkpoints.search(Search("alice", limit=2, before=(first[-1].created_at, first[-1].path)))
    assert [each.name for each in then] == ["c7", "c6"]
    monkeypatch.setattr(checkpoint_routes, "_SCANNED", 2)
    monkeypatch.setattr(checkpoint_routes, "_MOST_SCANNED", 4)
    names, pages, cursor = [], 0, None
    while True:
        page = await alice.ok("checkpoints/search", limit=3, cursor=cursor, user_metadata={"odd": "0"})
        names += [each["checkpoint_id"] for each in page["checkpoints"]]
        pages += 1
        if (cursor := page["next_cursor"]) is None:
            break
    assert names == [f"weights/c{number}" for number in (8, 6, 4, 2)]
    assert pages == 3, "a page has a cursor after it has examined four rows"


async def test_unfinished_uploads_count_as_stored_bytes(stand: Stand, alice: Rest) -> None:
    assert stand.gateway is not None
    await stand.gateway.components.owners.put(Owner("alice", max_stored_bytes=1_000_000))

    async def begin() -> str:
        begun = await alice.ok("external_weights_upload_start", base_model=MODEL, lora_config={"rank": 4})
        return str(begun["urls"]["adapter_model.safetensors"])

    async def put(url: str, count: int) -> httpx.Response:
        async with httpx.AsyncClient(base_url=stand.url, timeout=60) as anybody:
            return await anybody.put(url, content=b"x" * count)

    first, second = await begin(), await begin()
    assert (await put(first, 600_000)).status_code == 200
    assert (await put(first, 900_000)).status_code == 429, "both exist until the replacement is complete"
    assert (await put(first, 300_000)).status_code == 200
    assert (await put(second, 600_000)).status_code == 200
    assert (await put(second, 200_000)).status_code == 429
    urls = [await begin() for _ in range(4)]
    answers = await asyncio.gather(*(put(url, 90_000) for url in urls))
    assert sum(answer.status_code == 200 for answer in answers) <= 1
    await stand.stop()
    await stand.start()
    await eventually(lambda: stand.gateway.components.checkpoints.unfinished_bytes["alice"] >= 900_000)  # type: ignore[union-attr]
    refused = await put(await begin(), 200_000)
    assert (refused.status_code, "max_stored_bytes" in json.dumps(refused.json())) == (429, True)
