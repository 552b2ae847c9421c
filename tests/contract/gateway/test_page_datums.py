"""The datums with the largest loss per token: ranked, bounded, with pictures, and private to an owner."""

import hashlib
from pathlib import Path
from typing import Any

import httpx
from tinker import types

from fovea_gateway.access.api_keys import Scope
from tests.contract.gateway.conftest import Stand, running
from tests.contract.gateway.fakes import HARD
from tests.contract.gateway.requests import PNG, Rest
from tests.contract.gateway.test_page_samples import groups_of, step, write_tokenizer
from tests.waiting import eventually

PATIENCE_S = 20


def example(prompt: list[int], answer: list[int], picture: bytes = b"") -> types.Datum:
    """Returns a datum of supervised fine-tuning: an optional picture, a prompt, and an answer with the weights."""
    chunks: list[Any] = [types.ImageChunk(data=picture, format="png", expected_tokens=4)] if picture else []
    whole = types.ModelInput(chunks=[*chunks, types.EncodedTextChunk(tokens=[*prompt, *answer[:-1]])])
    before = whole.length - len(answer)
    return types.Datum(
        model_input=whole,
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=[0] * before + answer, dtype="int64", shape=[whole.length]),
            "weights": types.TensorData(
                data=[0.0] * before + [1.0] * len(answer), dtype="float32", shape=[whole.length]
            ),
        },
    )


async def learn(rest: Rest, model_id: str, seq_id: int, data: list[types.Datum]) -> None:
    """Runs a cross-entropy loss and an optimizer step."""
    await step(rest, model_id, seq_id, data, "cross_entropy")


async def datums_of(http: httpx.AsyncClient, source: str, **query: Any) -> list[dict[str, Any]]:
    """Returns the datums of a model in page order."""
    return await groups_of(http, source, "live/datums", **query)


async def test_datums_are_ranked_by_their_loss_and_only_their_owner_sees_them(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    async with running(Stand(tmp_path), tokenizer=str(tmp_path)) as stand, stand.http() as http:
        rest = Rest(http)
        model_id = await rest.create_model()
        hard, half = example([1, 2, 3], [HARD, HARD + 1], PNG), example([4, 5], [7, HARD])
        await learn(rest, model_id, 1, [example([6], [7, 8]), hard, half])

        async def losses(**query: Any) -> list[tuple[int, float]]:
            return [(one["step"], round(one["loss"], 3)) for one in await datums_of(http, model_id, **query)]

        async def are_first() -> bool:
            return await losses() == [(1, 4.0), (1, 2.5), (1, 1.0)]

        await eventually(are_first, PATIENCE_S)
        first, second, _ = await datums_of(http, model_id)
        digest = hashlib.sha256(PNG).hexdigest()
        assert first["pieces"][0] == {"picture": digest, "is_kept": True}
        assert first["pieces"][1]["texts"] == ["w1", "w2", "w3"]
        assert (first["drawn"][0]["ids"], first["drawn"][0]["logprobs"]) == ([HARD, HARD + 1], [-4.0, -4.0])
        assert (second["pieces"][0]["ids"], second["drawn"][0]["texts"]) == ([4, 5], ["w7", f"w{HARD}"])
        assert (await http.get(f"live/pictures/{digest}")).content == PNG

        # A datum counts once, with its last loss. Held-out losses and policy losses do not count.
        await learn(rest, model_id, 3, [half])

        async def are_second() -> bool:
            return await losses(steps=8) == [(1, 4.0), (2, 1.25), (1, 1.0)]

        await eventually(are_second, PATIENCE_S)
        assert await losses() == [(2, 1.25)]

        assert stand.gateway is not None
        ring = stand.gateway.components.keys
        bob, _ = await ring.create("bob", "", Scope.READ, None)
        admin, _ = await ring.create("root", "", Scope.ADMIN, None)
        source = (await http.get("live/datums", params={"source": model_id})).json()["owner"]
        async with stand.http(bob) as other, stand.http(admin) as root:
            assert await datums_of(other, model_id) == []
            assert (await other.get(f"live/pictures/{digest}")).status_code == 404
            refused = await other.get("live/datums", params={"source": model_id, "owner": source})
            assert (refused.status_code, refused.json()["reason"]) == (403, "PERMISSION_DENIED")
            assert len(await datums_of(root, model_id, owner=source, steps=8)) == 3
            assert (await root.get(f"live/pictures/{digest}")).content == PNG
