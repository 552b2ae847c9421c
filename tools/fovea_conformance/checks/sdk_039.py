"""Section I: the calls that SDK 0.39 adds, over raw HTTP, because 0.38 does not make them."""

import json
from typing import Any

import httpx
import numpy as np
from safetensors.numpy import save

from fovea_conformance.adapters import ADAPTER, download
from fovea_conformance.check import Failed, Refused, check, expect
from fovea_conformance.target import Target, unique_name

Row = dict[str, Any]
_RANK = 8
_MODULE = "model.language_model.layers.0.self_attn.q_proj"


@check("C122", "checkpoints/search: by metadata, kind and base model; pages without gap or repeat, newest first")
def c122_search(target: Target) -> str:
    """Creates three training checkpoints and one for sampling, and searches them by a unique mark, two per page."""
    mark, training = {"mark": unique_name("mark")}, target.training()
    saved = [training.save_state(f"s-{index}", user_metadata=mark).result(60).path for index in range(3)]
    saved.append(training.save_weights_for_sampler("s", user_metadata=mark).result(60).path)
    answer = target.http.get("checkpoints", params={"limit": 200}).raise_for_status()
    listed = set(_paths(answer.json()["checkpoints"]))
    expect(set(saved) <= listed, f"the listing lacks {sorted(set(saved) - listed)}")
    mine = _pages(target, {"user_metadata": mark})
    expect(_paths(mine) == saved[::-1], f"saved {saved}, found {_paths(mine)}")
    wrong = [row for row in mine if row.get("base_model") != target.model]
    expect(not wrong, f"base_model is not {target.model}: {wrong[:1]}")
    of_kind = _pages(target, {"user_metadata": mark, "checkpoint_type": "sampler", "base_models": [target.model]})
    expect(_paths(of_kind) == saved[-1:], f"to sample from is {saved[-1]}, found {_paths(of_kind)}")
    expect(not _pages(target, {"base_models": ["no-owner/no-model"]}), "checkpoints of a base model that is not there")
    return f"{len(mine)} of one run, on pages of two"


@check("C123", "external_weights_upload_start and _finish accept an adapter, or a 404 says that uploads are not served")
def c123_upload(target: Target) -> str:
    """Uploads an adapter of one module.

    The server must refuse to finish without files. They are sent without a key, and downloaded.
    """
    shape = {"rank": _RANK, "train_mlp": False, "train_unembed": False}
    begun = target.post("external_weights_upload_start", base_model=target.model, lora_config=shape)
    if begun.status_code == 404:
        detail = str(begun.json().get("detail", "")) if "json" in begun.headers.get("content-type", "") else ""
        expect("upload" in detail, f"answered 404 without saying that uploads are not there: {begun.text}")
        raise Refused(detail)
    expect(begun.status_code == 200, f"external_weights_upload_start answered {begun.status_code} {begun.text[:200]}")
    upload, files = begun.json(), _adapter(target.model)
    expect(
        set(files) <= set(upload["urls"]), f"there are URLs for {sorted(upload['urls'])}, an adapter is {sorted(files)}"
    )
    early = target.post("external_weights_upload_finish", upload_id=upload["upload_id"])
    expect(400 <= early.status_code < 500, f"finished before a file was sent: {early.status_code} {early.text[:200]}")
    for name, content in files.items():
        url, headers = upload["urls"][name], {}
        if isinstance(url, dict):  # of SDK 0.40
            url, headers = url["url"], url["headers"]
        sent = httpx.put(url, content=content, headers=headers, timeout=60)
        expect(sent.is_success, f"{name} answered {sent.status_code} {sent.text[:200]}")
    done = target.post("external_weights_upload_finish", upload_id=upload["upload_id"])
    if done.status_code in (400, 422) and _MODULE.rpartition(".")[2] in done.text:
        return "looked at: this model has no such module"
    expect(done.status_code == 200, f"external_weights_upload_finish answered {done.status_code} {done.text[:200]}")
    path = str(done.json()["tinker_path"])
    found = download(target.rest(), path)
    target.rest().delete_checkpoint_from_tinker_path(path).result(60)
    expect(found == files, f"sent {sorted(files)}, found { ({name: len(data) for name, data in found.items()}) }")
    return "an adapter of one module, the same when downloaded"


def _adapter(model: str) -> dict[str, bytes]:
    """Returns the files of an adapter of the first query projection, as PEFT writes them."""
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": model,
        "r": _RANK,
        "lora_alpha": 32,
        "bias": "none",
        "target_modules": [_MODULE],
    }
    tensors = {
        f"base_model.model.{_MODULE}.lora_{half}.weight": np.ones(shape, np.float32)
        for half, shape in (("A", (_RANK, 64)), ("B", (64, _RANK)))
    }
    return {"adapter_config.json": json.dumps(config).encode(), ADAPTER: save(tensors)}


def _pages(target: Target, asked: Row) -> list[Row]:
    """Returns all results, two per page. Raises Failed if a page repeats a result of another."""
    found: list[Row] = []
    cursor = None
    while True:
        answer = target.post("checkpoints/search", **asked, limit=2, cursor=cursor)
        expect(answer.status_code == 200, f"checkpoints/search answered {answer.status_code} {answer.text[:200]}")
        page = answer.json()
        expect(len(page["checkpoints"]) <= 2, f"a page of 2 has {len(page['checkpoints'])}")
        found += page["checkpoints"]
        paths = _paths(found)
        expect(len(set(paths)) == len(paths), "a checkpoint is on two pages")
        cursor = page.get("next_cursor")
        if cursor is None:
            return found
        if not page["checkpoints"]:
            raise Failed("a page is empty, and there is another one")


def _paths(rows: list[Row]) -> list[str]:
    return [str(row["tinker_path"]) for row in rows]
