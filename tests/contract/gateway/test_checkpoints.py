"""Permissions to read, keep and delete checkpoints: publishing, expiry, copies and consistent listings."""

import asyncio
import pathlib
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import tinker

from fovea_gateway.checkpoints import checkpoint_registry as rows
from tests.contract.gateway.conftest import KEY, Stand, running
from tests.contract.gateway.fakes import MODEL
from tests.contract.gateway.keeping import KeepingTrainer
from tests.contract.gateway.requests import Rest

OTHER_KEY = "tml-other"
LONG_AGO = 1.0


@pytest.fixture
async def stand(tmp_path: pathlib.Path, database_url: str) -> AsyncIterator[Stand]:
    """A stand with two callers; its trainer writes real files."""
    stand = Stand(tmp_path)
    stand.trainer = KeepingTrainer(lambda: stand.samplers)
    async with running(stand, database_url=database_url, api_key=[KEY, OTHER_KEY]):
        yield stand


@pytest.fixture
async def other(stand: Stand) -> AsyncIterator[Rest]:
    """A second caller with a session."""
    async with stand.http(OTHER_KEY) as http:
        client = Rest(http)
        await client.open_session()
        yield client


async def save(client: Rest, model_id: str, seq_id: int, name: str, route: str = "save_weights", **rest: Any) -> str:
    """Saves a checkpoint; returns its path."""
    submitted = await client.ok(route, model_id=model_id, seq_id=seq_id, path=name, **rest)
    answer = await client.result(submitted["request_id"])
    return str(answer["path"])


async def load(client: Rest, number: int, path: str) -> dict[str, Any]:
    """Creates a model from a path; returns the outcome."""
    body = {"session_id": client.session_id, "model_seq_id": number, "path": path, "optimizer": True}
    return await client.result((await client.ok("load_weights", **body))["request_id"])


async def open_sampling(client: Rest, number: int, path: str) -> Any:
    """Opens a sampling session on a path; returns the response."""
    body = {"session_id": client.session_id, "sampling_session_seq_id": number, "model_path": path}
    return await client.post("create_sampling_session", **body)


async def sample(client: Rest, sampling_session_id: str, seq_id: int) -> Any:
    """Samples; returns the response."""
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
    body = {"sampling_session_id": sampling_session_id, "seq_id": seq_id, "prompt": prompt}
    return await client.post("asample", **body, sampling_params={"max_tokens": 2})


def below(path: str) -> str:
    """Returns the REST path of a `tinker://` path."""
    run, segment, name = path.removeprefix("tinker://").split("/")
    return f"training_runs/{run}/checkpoints/{segment}/{name}"


async def expire(stand: Stand, path: str) -> None:
    assert stand.gateway is not None
    await stand.gateway.components.database.write(lambda connection: rows.update_expiry(connection, path, LONG_AGO))


async def test_published_checkpoints_are_everybodys(stand: Stand, rest: Rest, other: Rest) -> None:
    model_id = await rest.create_model(user_metadata={"renderer_name": "r"})
    state = await save(rest, model_id, 1, "state")
    weights = await save(rest, model_id, 2, "weights", "save_weights_for_sampler")
    hidden = await save(rest, model_id, 3, "hidden")
    for path in (state, weights):
        assert (await other.post("weights_info", tinker_path=path)).status_code == 404
        # Twice: a repeat must succeed, because a 409 would stall the SDK for minutes.
        for _ in range(2):
            assert (await rest.http.post(f"{below(path)}/publish")).status_code == 200
        info = (await other.post("weights_info", tinker_path=path)).json()
        assert info == {
            "base_model": MODEL, "is_lora": True, "optimizer_config": {"type": "adamw"},
            "lora_rank": 8, "train_unembed": True, "train_mlp": True, "train_attn": True,
        }  # fmt: skip
    assert (await load(other, 0, state))["path"] == state
    assert "there is no checkpoint" in (await load(other, 1, hidden))["error"]
    opened = await open_sampling(other, 0, weights)
    assert opened.status_code == 200
    assert (await sample(other, opened.json()["sampling_session_id"], 0)).status_code == 200
    listed = (await other.http.get(f"training_runs/{model_id}/checkpoints")).json()["checkpoints"]
    assert [(entry["checkpoint_id"], entry["public"]) for entry in listed] == [
        ("sampler_weights/weights", True), ("weights/state", True),
    ]  # fmt: skip
    runs = (await other.http.get("training_runs", params={"access_scope": "accessible"})).json()
    of_id = {run["training_run_id"]: run for run in runs["training_runs"]}
    assert set(of_id) == {f"{other.session_id}:train:0", f"{other.session_id}:train:1", model_id}
    assert runs["cursor"]["total_count"] == 3
    assert of_id[model_id]["last_checkpoint"]["checkpoint_id"] == "weights/state"
    run = await other.http.get(f"training_runs/{model_id}", params={"access_scope": "accessible"})
    assert run.json()["user_metadata"] == {"renderer_name": "r"}


async def test_only_the_owner_changes_a_published_checkpoint(stand: Stand, rest: Rest, other: Rest) -> None:
    model_id = await rest.create_model()
    path = await save(rest, model_id, 1, "state")
    await rest.http.post(f"{below(path)}/publish")
    assert (await other.http.delete(below(path))).status_code == 404
    assert (await other.http.put(f"{below(path)}/ttl", json={"ttl_seconds": 3600})).status_code == 404
    assert (await other.http.post(f"{below(path)}/publish")).status_code == 404
    assert (await other.http.delete(f"{below(path)}/publish")).status_code == 404
    assert (await other.http.get(f"training_runs/{model_id}")).status_code == 404
    owned = (await other.http.get("training_runs")).json()
    assert (owned["training_runs"], owned["cursor"]["total_count"]) == ([], 0)
    for _ in range(2):
        assert (await rest.http.delete(f"{below(path)}/publish")).status_code == 200
    assert "there is no checkpoint" in (await load(other, 0, path))["error"]
    assert (await other.http.get(f"training_runs/{model_id}/checkpoints")).status_code == 404
    assert (await rest.http.post(f"training_runs/{model_id}/checkpoints/nonsense/x/publish")).status_code == 400
    assert (await rest.http.post(f"training_runs/{model_id}/checkpoints/weights/unknown/publish")).status_code == 404


@pytest.mark.parametrize(("method", "action"), [("DELETE", ""), ("PUT", "/ttl"), ("POST", "/publish")])
async def test_an_id_without_its_kind_is_named(stand: Stand, rest: Rest, method: str, action: str) -> None:
    model_id = await rest.create_model()
    path = await save(rest, model_id, 1, "ckpt0")
    answer = await rest.http.request(method, f"training_runs/{model_id}/checkpoints/ckpt0{action}")
    assert answer.status_code == 400
    assert "'ckpt0' lacks its kind: use one of weights/ckpt0, sampler_weights/ckpt0" in answer.text
    assert (await rest.http.delete(below(path))).status_code == 200


async def test_a_replaced_checkpoint_is_private_again(stand: Stand, rest: Rest, other: Rest) -> None:
    model_id = await rest.create_model()
    path = await save(rest, model_id, 1, "state", user_metadata={"a": "1"})
    await rest.http.post(f"{below(path)}/publish")
    await save(rest, model_id, 2, "state", overwrite=True, user_metadata={"b": "2"})
    listed = (await rest.http.get("checkpoints")).json()["checkpoints"]
    assert [(entry["public"], entry["user_metadata"]) for entry in listed] == [(False, {"b": "2"})]
    assert (await other.post("weights_info", tinker_path=path)).status_code == 404


@pytest.mark.parametrize("how", ["delete", "expire", "unpublish"])
async def test_sampling_stops_at_once(stand: Stand, rest: Rest, other: Rest, how: str) -> None:
    path = await save(rest, await rest.create_model(), 1, "weights", "save_weights_for_sampler")
    await rest.http.post(f"{below(path)}/publish")
    opened = (await open_sampling(other, 0, path)).json()["sampling_session_id"]
    submitted = (await sample(other, opened, 0)).json()
    assert "sequences" in await other.result(submitted["request_id"])
    if how == "delete":
        assert (await rest.http.delete(below(path))).status_code == 200
    elif how == "unpublish":
        assert (await rest.http.delete(f"{below(path)}/publish")).status_code == 200
    else:
        ttl = await rest.http.put(f"{below(path)}/ttl", json={"ttl_seconds": 3600})
        assert ttl.status_code == 200
        await expire(stand, path)
        assert stand.gateway is not None
        stand.gateway.components.checkpoints._sampled.clear()
    refused = await sample(other, opened, 1)
    assert (refused.status_code, "there is no checkpoint" in refused.json()["detail"]) == (404, True)
    assert (await open_sampling(other, 1, path)).status_code == 404


async def test_time_to_live(stand: Stand, rest: Rest) -> None:
    model_id = await rest.create_model()
    path = await save(rest, model_id, 1, "state", ttl_seconds=3600)
    await save(rest, model_id, 2, "stays")

    async def expiry() -> str | None:
        listed = (await rest.http.get(f"training_runs/{model_id}/checkpoints")).json()["checkpoints"]
        found: str | None = next(entry for entry in listed if entry["tinker_path"] == path)["expires_at"]
        return found

    assert await expiry() is not None
    for wrong in (3599, 0, -1, 10**12):
        refused = await rest.http.put(f"{below(path)}/ttl", json={"ttl_seconds": wrong})
        assert (refused.status_code, "ttl_seconds" in refused.json()["detail"]) == (400, True)
    submitted = await rest.ok("save_weights", model_id=model_id, seq_id=3, path="short", ttl_seconds=3599)
    assert (await rest.result(submitted["request_id"]))["category"] == "user"
    assert (await rest.http.put(f"{below(path)}/ttl", json={"ttl_seconds": None})).status_code == 200
    assert await expiry() is None
    assert (await rest.http.put(f"{below(path)}/ttl", json={})).status_code == 400
    await expire(stand, path)
    # Even before a sweep it is neither listed, counted nor loadable.
    page = (await rest.http.get("checkpoints")).json()
    assert ([entry["checkpoint_id"] for entry in page["checkpoints"]], page["cursor"]["total_count"]) == (
        ["weights/stays"], 1,
    )  # fmt: skip
    run = (await rest.http.get(f"training_runs/{model_id}")).json()
    assert run["last_checkpoint"]["checkpoint_id"] == "weights/stays"
    assert "there is no checkpoint" in (await load(rest, 1, path))["error"]
    assert (await rest.post("weights_info", tinker_path=path)).status_code == 404


async def test_a_late_sweep_spares_what_took_the_name(stand: Stand, rest: Rest) -> None:
    model_id = await rest.create_model()
    path = await save(rest, model_id, 1, "state")
    assert stand.gateway is not None
    database = stand.gateway.components.database
    await expire(stand, path)
    old = (await database.read(lambda connection: rows.expired_rows(connection, time.time())))[0]
    await save(rest, model_id, 2, "state")
    await stand.gateway.components.checkpoints._drop(old)
    assert (await load(rest, 1, path))["path"] == path


async def test_copies(stand: Stand, rest: Rest, other: Rest) -> None:
    model_id = await rest.create_model(user_metadata={"renderer_name": "r"})
    sources = [
        await save(rest, model_id, 1, "state", ttl_seconds=3600),
        await save(rest, model_id, 2, "weights", "save_weights_for_sampler"),
        await save(rest, model_id, 3, "out", "save_weights_external"),
    ]
    copies = []
    for number, source in enumerate(sources):
        body = {"source_path": source, "session_id": other.session_id, "model_seq_id": number}
        assert (await other.post("copy_weights", **body)).status_code == 404
        await rest.http.post(f"{below(source)}/publish")
        copies.append((await other.ok("copy_weights", **body))["tinker_path"])
        run = f"{other.session_id}:train:{number}"
        assert copies[-1] == source.replace(model_id, run)
        # A repeated request gets the same answer without a second copy.
        assert (await other.ok("copy_weights", **body))["tinker_path"] == copies[-1]
        assert (await rest.http.delete(below(source))).status_code == 200
    listed = (await other.http.get("checkpoints")).json()["checkpoints"]
    assert [entry["tinker_path"] for entry in listed] == copies[::-1]
    assert [(entry["public"], entry["expires_at"]) for entry in listed] == [(False, None)] * 3
    # Each copy keeps its kind and outlives its source.
    assert (await load(other, 3, copies[0]))["path"] == copies[0]
    opened = (await open_sampling(other, 0, copies[1])).json()["sampling_session_id"]
    submitted = (await sample(other, opened, 0)).json()
    assert "sequences" in await other.result(submitted["request_id"])
    links = (await other.http.get(f"{below(copies[2])}/external_weights_urls")).json()["urls"]
    assert len((await other.http.get(links["adapter_model.safetensors"])).content) > 2**20
    # The runs of the copies cannot be trained.
    run = (await other.http.get(f"training_runs/{other.session_id}:train:0")).json()
    assert (run["user_metadata"], run["corrupted"]) == ({"renderer_name": "r"}, False)
    step = await other.ok("optim_step", model_id=run["training_run_id"], seq_id=1, adam_params={})
    assert "cannot be trained" in (await other.result(step["request_id"]))["error"]


async def test_copies_are_made_once_for_a_key(stand: Stand, rest: Rest) -> None:
    source = await save(rest, await rest.create_model(), 1, "state")
    body = {"source_path": source, "session_id": rest.session_id, "model_seq_id": 1, "ttl_seconds": 3600}
    headers = {"X-Idempotency-Key": "k"}
    first = await rest.http.post("copy_weights", json=body, headers=headers)
    await rest.http.delete(below(source))
    again = await rest.http.post("copy_weights", json=body | {"model_seq_id": 2}, headers=headers)
    assert (again.status_code, again.json()) == (200, first.json())
    other = await rest.http.post("copy_weights", json=body | {"source_path": source + "x"}, headers=headers)
    assert (other.status_code, other.json()["field"]) == (400, "source_path")
    assert f"belongs to a copy of {source}" in other.json()["detail"]
    assert (await rest.http.get("training_runs")).json()["cursor"]["total_count"] == 2


async def test_a_copy_goes_into_a_project(stand: Stand, rest: Rest) -> None:
    source = await save(rest, await rest.create_model(), 1, "state")
    client = await asyncio.to_thread(tinker.RestClient, base_url=stand.url, api_key=KEY)
    path = await client.copy_weights(source, "archive")
    found = await rest.ok("checkpoints/search", project_ids=["archive"])
    assert [each["tinker_path"] for each in found["checkpoints"]] == [path]
    (session,) = (await rest.ok("sessions/search", project_ids=["archive"]))["sessions"]
    assert (session["status"]["type"], session["checkpoints_count"]) == ("client_finished", 1)
    body = {"source_path": source, "destination_project_id": "archive"}
    headers = {"X-Idempotency-Key": "twice"}
    twice = [(await rest.http.post("copy_weights", json=body, headers=headers)).json() for _ in range(2)]
    assert twice[0] == twice[1]


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"model_seq_id": 0}, 400, "already exists"),
        ({"destination_project_id": "p"}, 400, "destination_project_id"),
        ({"weights_access_token": "t"}, 400, "weights_access_token"),
        ({"session_id": None}, 400, "session_id"),
        ({"session_id": "sess-unknown"}, 404, "sess-unknown"),
        ({"source_path": "tinker://x/weights/y"}, 404, "tinker://x/weights/y"),
        ({"source_path": "nonsense"}, 400, "source_path"),
        ({"ttl_seconds": 5}, 400, "ttl_seconds"),
    ],
)
async def test_bad_copies(stand: Stand, rest: Rest, change: dict[str, Any], status: int, words: str) -> None:
    source = await save(rest, await rest.create_model(), 1, "state")
    body = {"source_path": source, "session_id": rest.session_id, "model_seq_id": 1} | change
    refused = await rest.http.post("copy_weights", json=body)
    assert (refused.status_code, words in refused.json()["detail"]) == (status, True), refused.text
    assert len((await rest.http.get("checkpoints")).json()["checkpoints"]) == 1


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("training_runs?project_id=p%20p", "project_id"),
        ("training_runs?access_scope=all", "access_scope"),
        ("training_runs?sort=name", "sort"),
        ("checkpoints?access_scope=owned", "access_scope"),
        ("checkpoints?limit=x", "limit"),
    ],
)
async def test_unknown_parameters_are_refused_by_name(rest: Rest, path: str, word: str) -> None:
    refused = await rest.http.get(path)
    assert (refused.status_code, word in refused.json()["detail"]) == (400, True)


async def test_pages_count_all(stand: Stand, rest: Rest) -> None:
    runs = [await rest.create_model(number) for number in range(3)]
    for seq_id in range(1, 4):
        await save(rest, runs[0], seq_id, f"s{seq_id}")

    def use(client: tinker.ServiceClient) -> None:
        api = tinker.RestClient(base_url=stand.url, api_key=KEY)
        seen = []
        for offset in range(4):
            page = api.list_training_runs(limit=1, offset=offset).result()
            assert (page.cursor.offset, page.cursor.limit, page.cursor.total_count) == (offset, 1, 3)
            seen += [run.training_run_id for run in page.training_runs]
        assert sorted(seen) == runs
        listed = api.list_user_checkpoints(limit=2, offset=2).result()
        assert [checkpoint.checkpoint_id for checkpoint in listed.checkpoints] == ["weights/s1"]
        assert listed.cursor is not None
        assert listed.cursor.total_count == 3

    await stand.sdk(use)


async def test_load_into_a_model_at_once_and_later(stand: Stand, rest: Rest) -> None:
    first = await rest.create_model()
    step = await rest.ok("optim_step", model_id=first, seq_id=1, adam_params={})
    await rest.result(step["request_id"])
    path = await save(rest, first, 2, "state")
    second = await rest.create_model(1)
    for seq_id in (1, 3):
        loaded = await rest.ok("load_weights", model_id=second, seq_id=seq_id, path=path, optimizer=True)
        assert (await rest.result(loaded["request_id"]))["path"] == path
        await rest.ok("optim_step", model_id=second, seq_id=seq_id + 1, adam_params={})
    wrong = await rest.ok("load_weights", model_id=second, seq_id=5, path=path + "x", optimizer=True)
    assert "there is no checkpoint" in (await rest.result(wrong["request_id"]))["error"]


async def test_a_model_made_from_a_checkpoint_is_made_once(stand: Stand, rest: Rest) -> None:
    path = await save(rest, await rest.create_model(), 1, "state")
    body = {"session_id": rest.session_id, "model_seq_id": 1, "path": path, "optimizer": False}
    first, again = await rest.ok("load_weights", **body), await rest.ok("load_weights", **body)
    assert first == again
    assert first["model_id"] == f"{rest.session_id}:train:1"
    loaded = await rest.result(first["request_id"])
    assert (loaded["model_id"], loaded["path"]) == (first["model_id"], path)
    assert [request.model_id for request in stand.trainer.of("LoadState")] == [first["model_id"]]
