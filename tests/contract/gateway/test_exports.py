"""Exports: written, listed with signed links, downloaded in ranges without a key, encrypted and deleted."""

import asyncio
import pathlib
import re
import uuid
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

import fsspec
import grpc
import httpx
import pyrage  # type: ignore[import-untyped]
import pytest
import tinker

from fovea.api.v1 import gateway_pb2, gateway_pb2_grpc
from fovea_gateway.checkpoints import checkpoint_registry as rows
from tests.contract.gateway.conftest import KEY, Stand, running
from tests.contract.gateway.keeping import CONFIG, WEIGHT_BYTES, WEIGHTS, KeepingTrainer, weights
from tests.contract.gateway.requests import Rest
from tests.syncs import Syncs
from tests.waiting import eventually

OTHER_KEY = "tml-other"


@pytest.fixture(params=["local", "memory", "s3"])
async def keeping(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> AsyncIterator[Stand]:
    """A stand with a trainer that writes real files, to a local folder or another fsspec file system."""
    if request.param == "local":
        root = str(tmp_path / "kept")
    else:
        root = "memory:/" if request.param == "memory" else request.getfixturevalue("new_bucket")()
        root += f"/kept-{uuid.uuid4().hex}"
    stand = Stand(tmp_path)
    stand.trainer = KeepingTrainer(lambda: stand.samplers)
    async with running(
        stand, checkpoint_dir=root, base_path="/base", api_key=[KEY, OTHER_KEY], allowed_host=["fovea.example"]
    ):
        yield stand


@pytest.fixture
async def client(keeping: Stand) -> AsyncIterator[Rest]:
    """A bare client with a session."""
    async with keeping.http() as http:
        client = Rest(http)
        await client.open_session()
        yield client


async def export(client: Rest, model_id: str, seq_id: int = 1, **options: Any) -> dict[str, Any]:
    """Requests one export; returns its outcome."""
    body = {"path": "out", **options}
    submitted = await client.ok("save_weights_external", model_id=model_id, seq_id=seq_id, **body)
    return await client.result(submitted["request_id"])


def links_of(model_id: str, name: str = "out") -> str:
    return f"training_runs/{model_id}/checkpoints/external_weights/{name}/external_weights_urls"


def stored(stand: Stand) -> list[str]:
    """Returns all files below the checkpoint root."""
    files, path = fsspec.core.url_to_fs(stand.overrides["checkpoint_dir"])
    files.invalidate_cache()  # the test's gateway lists with the same file system
    return [name.removeprefix(path) for name in files.find(path)]


async def test_storage_that_cannot_be_written_is_named_at_the_start(
    tmp_path: pathlib.Path, new_bucket: Callable[[], str], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    for root, said in ((f"{new_bucket()}-none/kept", "bucket"), (str(tmp_path / "file" / "kept"), "Not a directory")):
        async with running(Stand(tmp_path), checkpoint_dir=root):
            await eventually(lambda root=root, said=said: f"saved at {root}" in caplog.text and said in caplog.text)


async def test_storage_that_can_be_written_is_left_as_it_was(keeping: Stand) -> None:
    assert keeping.gateway is not None
    assert await keeping.gateway.components.storage.problem() == ""
    await eventually(lambda: stored(keeping) == [])  # the gateway retries at its start, possibly until now


async def test_an_export_is_downloaded_without_a_key(keeping: Stand, client: Rest) -> None:
    model_id = await client.create_model()
    saved = await export(client, model_id, ttl_seconds=3600)
    path = f"tinker://{model_id}/external_weights/out"
    assert saved == {"type": "save_weights_external", "path": path}
    answer = (await client.http.get(links_of(model_id), headers={"Host": "fovea.example:81"})).json()
    assert list(answer["urls"]) == [CONFIG, WEIGHTS], "an export must not contain files that only trainers read"
    assert all(url.startswith("http://fovea.example:81/base/api/v1/exports/") for url in answer["urls"].values())
    expires = datetime.fromisoformat(answer["expires"])
    assert timedelta(minutes=50) < expires - datetime.now(UTC) <= timedelta(hours=1)
    url = urlsplit((await client.http.get(links_of(model_id))).json()["urls"][WEIGHTS])
    assert url.netloc == f"127.0.0.1:{keeping.port}"
    async with httpx.AsyncClient(timeout=60) as anybody:
        got = await anybody.get(url.geturl())
        assert (got.status_code, got.content) == (200, weights(0))
        assert got.headers["content-length"] == str(WEIGHT_BYTES)
        head = await anybody.head(url.geturl())
        assert (head.status_code, head.content, head.headers["content-length"]) == (200, b"", str(WEIGHT_BYTES))
    listed = (await client.http.get("checkpoints")).json()["checkpoints"][0]
    assert (listed["checkpoint_type"], listed["size_bytes"]) == ("external", WEIGHT_BYTES + 21)
    # An export's snapshot does not stay in the trainer's memory, because nothing samples from it.
    assert keeping.trainer.snapshots == {}


async def test_weights_to_sample_from_are_downloaded_as_an_export_is(keeping: Stand, client: Rest) -> None:
    model_id = await client.create_model()
    body = {"model_id": model_id, "seq_id": 1, "path": "out"}
    await client.result((await client.ok("save_weights_for_sampler", **body))["request_id"])
    answer = (await client.http.get(links_of(model_id).replace("external_weights/", "sampler_weights/"))).json()
    assert list(answer["urls"]) == [CONFIG, WEIGHTS], "listings must not show files that only trainers read"
    url = answer["urls"][WEIGHTS]
    assert (await client.http.get(url)).content == weights(0)
    for wrong in (url.replace("sampler_weights", "external_weights"), url.replace(WEIGHTS, "fovea_lora.json")):
        assert (await client.http.get(wrong)).status_code == 403
    async with keeping.http(OTHER_KEY) as other:
        refused = await other.get(links_of(model_id).replace("external_weights/", "sampler_weights/"))
        assert refused.status_code == 404


RANGES = [
    ("bytes=0-9", 206, 0, 10),
    ("bytes=1048570-2097160", 206, 1048570, 2097161),
    ("bytes=3145740-", 206, 3145740, WEIGHT_BYTES),
    ("bytes=-5", 206, WEIGHT_BYTES - 5, WEIGHT_BYTES),
    ("bytes=5-99999999999", 206, 5, WEIGHT_BYTES),
    ("bytes=0-1,5-6", 200, 0, WEIGHT_BYTES),
    ("bytes=9-3", 200, 0, WEIGHT_BYTES),
    ("lines=1-2", 200, 0, WEIGHT_BYTES),
]


async def test_ranges(keeping: Stand, client: Rest) -> None:
    model_id = await client.create_model()
    await export(client, model_id)
    url = (await client.http.get(links_of(model_id))).json()["urls"][WEIGHTS]
    for asked, status, start, stop in RANGES:
        got = await client.http.get(url, headers={"Range": asked})
        assert (got.status_code, got.content) == (status, weights(0)[start:stop]), asked
        wanted = f"bytes {start}-{stop - 1}/{WEIGHT_BYTES}" if status == 206 else None
        assert got.headers.get("content-range") == wanted
        other = await client.http.get(url, headers={"Range": asked, "If-Range": '"something else"'})
        assert (other.status_code, len(other.content)) == (200, WEIGHT_BYTES)
    for beyond in (f"bytes={WEIGHT_BYTES}-", "bytes=-0"):
        refused = await client.http.get(url, headers={"Range": beyond})
        assert (refused.status_code, refused.headers["content-range"]) == (416, f"bytes */{WEIGHT_BYTES}")


async def test_links_lead_nowhere_else(keeping: Stand, client: Rest) -> None:
    model_id = await client.create_model()
    await export(client, model_id)
    await export(client, model_id, 2, path="second")
    first = (await client.http.get(links_of(model_id))).json()["urls"]
    second = (await client.http.get(links_of(model_id, "second"))).json()["urls"]
    url, other = first[WEIGHTS], second[WEIGHTS]
    signature = url.rpartition("signature=")[2]
    later = str(int(datetime.now(UTC).timestamp()) + 10**6)
    for wrong in (
        url.replace(signature, other.rpartition("signature=")[2]),
        url.replace(signature, ""),
        url.replace(signature, "é"),
        url.partition("&signature")[0],
        url.replace(WEIGHTS, CONFIG),
        url.replace(WEIGHTS, "%2e%2e/%2e%2e/gateway.db"),
        url.replace(url.partition("expires=")[2].partition("&")[0], later),
        url.replace("/out/", "/second/"),
        url.replace("/out/", "/nothing/"),
    ):
        assert (await client.http.get(wrong)).status_code == 403, wrong
    assert (await client.http.get(url.partition("?")[0])).status_code == 400
    assert (await client.http.get(url)).status_code == 200
    path = f"training_runs/{model_id}/checkpoints/external_weights/out"
    assert (await client.http.delete(path)).status_code == 200
    assert (await client.http.get(url)).status_code == 403
    assert (await client.http.get(links_of(model_id))).status_code == 404
    assert [name for name in stored(keeping) if "/out." in name] == []
    # A new export under the same name does not match the old link.
    await export(client, model_id, 3)
    assert (await client.http.get(url)).status_code == 403


async def test_links_expire_with_the_export_and_outlive_a_restart(keeping: Stand, client: Rest) -> None:
    model_id = await client.create_model()
    await export(client, model_id)
    url = (await client.http.get(links_of(model_id))).json()["urls"][CONFIG]
    await keeping.stop()
    await keeping.start()
    assert keeping.gateway is not None
    assert (await client.http.get(url)).status_code == 200
    path = f"tinker://{model_id}/external_weights/out"
    await keeping.gateway.components.database.write(lambda connection: rows.update_expiry(connection, path, 1.0))
    assert (await client.http.get(url)).status_code == 403
    await keeping.gateway.components.checkpoints.sweep()
    assert [name for name in stored(keeping) if "/out." in name] == []


async def test_others_read_exports_once_they_are_published(keeping: Stand, client: Rest) -> None:
    model_id = await client.create_model()
    await export(client, model_id)
    async with keeping.http(OTHER_KEY) as other:
        assert (await other.get(links_of(model_id))).status_code == 404
        await client.http.post(f"training_runs/{model_id}/checkpoints/external_weights/out/publish")
        assert (await other.get(links_of(model_id))).status_code == 200


async def test_encrypted_exports(keeping: Stand, client: Rest) -> None:
    identities = [pyrage.x25519.Identity.generate() for _ in range(2)]
    recipients = [str(identity.to_public()) for identity in identities]
    model_id = await client.create_model()
    await export(client, model_id, age_encryption_recipients=recipients)
    urls = (await client.http.get(links_of(model_id))).json()["urls"]
    assert list(urls) == [f"{CONFIG}.age", f"{WEIGHTS}.age"]
    got = (await client.http.get(urls[f"{WEIGHTS}.age"])).content
    for identity in identities:
        assert pyrage.decrypt(got, [identity]) == weights(0)
    with pytest.raises(pyrage.DecryptError):
        pyrage.decrypt(got, [pyrage.x25519.Identity.generate()])
    assert all(name.endswith(".age") for name in stored(keeping)), "no file may stay unencrypted"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"age_encryption_recipients": ["age1nonsense"]}, r"age_encryption_recipients\[0\]"),
        ({"age_encryption_recipients": []}, "age_encryption_recipients is empty"),
        ({"age_encryption_recipients": "age1"}, "age_encryption_recipients"),
        ({"age_encryption_recipients": ["ssh-ed25519 AAAA"]}, r"age_encryption_recipients\[0\]"),
        ({"age_encryption_recipients": ["x"] * 65}, "65 entries"),
        ({"path": "../up"}, "is not a name"),
        ({"path": ""}, "is not a name"),
        ({"ttl_seconds": 60}, "ttl_seconds is 60"),
        ({"overwrite": True}, "overwrite"),
    ],
)
async def test_bad_exports_fail_by_name(keeping: Stand, client: Rest, options: dict[str, Any], words: str) -> None:
    model_id = await client.create_model()
    failed = await export(client, model_id, **options)
    assert failed["category"] == "user"
    assert re.search(words, failed["error"])
    assert stored(keeping) == []
    assert (await export(client, model_id, 2))["path"]


async def test_a_secret_key_is_not_repeated(keeping: Stand, client: Rest) -> None:
    secret = str(pyrage.x25519.Identity.generate())
    failed = await export(client, await client.create_model(), age_encryption_recipients=[secret])
    assert "is a secret key" in failed["error"]
    assert secret not in failed["error"]


async def test_a_taken_name_is_refused_and_nothing_is_lost(keeping: Stand, client: Rest) -> None:
    model_id = await client.create_model()
    await export(client, model_id)
    before = stored(keeping)
    failed = await export(client, model_id, 2)
    assert (failed["category"], "already" in failed["error"]) == ("user", True)
    assert stored(keeping) == before


@pytest.mark.parametrize("route", ["save_weights", "save_weights_for_sampler", "save_weights_external"])
async def test_a_trainer_that_dies_while_it_writes_leaves_no_files(keeping: Stand, client: Rest, route: str) -> None:
    assert isinstance(keeping.trainer, KeepingTrainer)
    model_id = await client.create_model()
    await client.result((await client.ok("save_weights", model_id=model_id, seq_id=1, path="kept"))["request_id"])
    before = stored(keeping)
    keeping.trainer.breaks_off = True
    answer = await client.result((await client.ok(route, model_id=model_id, seq_id=2, path="out"))["request_id"])
    assert "rank 1 of the trainer died" in answer["error"]
    assert stored(keeping) == before != []


async def test_a_trainer_that_writes_elsewhere_is_an_error(keeping: Stand, client: Rest) -> None:
    model_id = await client.create_model()
    assert isinstance(keeping.trainer, KeepingTrainer)
    keeping.trainer.elsewhere = "memory://elsewhere/"
    failed = await export(client, model_id)
    assert (failed["category"], "checkpoint_dir" in failed["error"]) == ("server", True)


async def test_an_export_that_a_restart_interrupts_is_made_again(keeping: Stand, client: Rest) -> None:
    model_id = await client.create_model()
    keeping.trainer.open.clear()
    body = {"model_id": model_id, "seq_id": 1, "path": "out"}
    submitted = await client.ok("save_weights_external", **body)
    await eventually(lambda: "TakeSnapshot" in keeping.trainer.names())
    await keeping.stop()
    # Otherwise the aborted call still writes.
    await eventually(lambda: keeping.trainer.waiting == 0)
    keeping.trainer.open.set()
    await keeping.start()
    assert (await client.result(submitted["request_id"]))["path"].endswith("/external_weights/out")
    assert len((await client.http.get(links_of(model_id))).json()["urls"]) == 2
    # A repeated request has the same id and creates nothing.
    assert (await client.ok("save_weights_external", **body)) == submitted
    assert len({name.rpartition("/")[0] for name in stored(keeping)}) == 1


async def test_exports_over_grpc(keeping: Stand, client: Rest) -> None:
    model_id = await client.create_model()
    identity = pyrage.x25519.Identity.generate()
    assert keeping.gateway is not None
    async with grpc.aio.insecure_channel(keeping.gateway.grpc.address) as channel:
        stub: Any = gateway_pb2_grpc.GatewayServiceStub(channel)
        request = gateway_pb2.SubmitSaveExternalRequest(
            model_id=model_id, seq_id=1, name="out", ttl_s=3600, age_recipients=[str(identity.to_public())]
        )
        future = await stub.SubmitSaveExternal(request, metadata=(("x-api-key", KEY),))
    assert (await client.result(future.future_id))["path"] == f"tinker://{model_id}/external_weights/out"
    assert list((await client.http.get(links_of(model_id))).json()["urls"]) == [f"{CONFIG}.age", f"{WEIGHTS}.age"]


async def test_the_sdk_exports_and_lists(keeping: Stand) -> None:
    def use(service: tinker.ServiceClient) -> None:
        training = service.create_lora_training_client(base_model="fovea/fake-vl", rank=4).result()
        path = training.save_weights_external("out", ttl_seconds=3600).result().path
        api = tinker.RestClient(base_url=keeping.url, api_key=KEY)
        answer = api.get_external_weights_urls(path).result()
        assert sorted(answer.urls) == [CONFIG, WEIGHTS]
        assert answer.expires > datetime.now(UTC)
        info = api.get_weights_info_by_tinker_path(path).result()
        assert (info.base_model, info.is_lora, info.lora_rank) == ("fovea/fake-vl", True, 4)
        api.set_checkpoint_ttl_from_tinker_path(path, 7200).result()
        api.delete_checkpoint_from_tinker_path(path).result()
        assert api.list_user_checkpoints().result().checkpoints == []
        with pytest.raises(tinker.RequestFailedError, match=r"age_encryption_recipients\[0\]"):
            training.save_weights_external("x", age_encryption_recipients=["age1x"]).result()

    await asyncio.wait_for(keeping.sdk(use), 60)


async def test_the_disk_has_what_the_gateway_wrote_before_it_says_so(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand, syncs = Stand(tmp_path), Syncs(monkeypatch)
    stand.trainer = KeepingTrainer(lambda: stand.samplers)
    async with running(stand, checkpoint_dir=str(tmp_path / "kept")), stand.http() as http:
        client = Rest(http)
        await client.open_session()
        model_id = await client.create_model()
        recipients = [str(pyrage.x25519.Identity.generate().to_public())]
        exported = (await export(client, model_id, age_encryption_recipients=recipients))["path"]
        body = {"source_path": exported, "session_id": client.session_id, "model_seq_id": 1}
        copied = (await client.ok("copy_weights", **body))["tinker_path"]
        assert stand.gateway is not None
        database = stand.gateway.components.database
        for path in (exported, copied):
            checkpoint = await database.read(lambda connection, path=path: rows.get_row(connection, path))
            assert checkpoint is not None
            assert not syncs.missing(pathlib.Path(checkpoint.uri))
        level = await database.write(lambda connection: connection.exec_driver_sql("PRAGMA synchronous").scalar())
        assert level == 2, "FULL: each commit must be on disk"
