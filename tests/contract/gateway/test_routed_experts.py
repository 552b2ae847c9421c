"""The experts of a sample through the unchanged SDK: requested with a header, fetched by id, and sent in a datum."""

import asyncio
import io
from typing import Any

import httpx
import numpy as np
import tinker
from tinker import types

from fovea.wire import tensors
from tests.contract.gateway.conftest import KEY, Stand
from tests.contract.gateway.fakes import MODEL

HEADERS = {"X-Fovea-Routed-Experts": "1"}
PROMPT = [1, 2, 3]


def fetch(stand: Stand, sequence_id: str, key: str = KEY) -> httpx.Response:
    """Sends a GET request."""
    return httpx.get(f"{stand.url}/api/v1/routed_experts/{sequence_id}", headers={"X-API-Key": key}, timeout=30)


def sample(client: tinker.ServiceClient) -> types.SampleResponse:
    """Samples two sequences of four tokens."""
    sampling = client.create_sampling_client(base_model=MODEL).result()
    params = types.SamplingParams(max_tokens=4)
    return sampling.sample(types.ModelInput.from_ints(PROMPT), 2, params).result()


async def test_from_a_sample_into_a_datum(stand: Stand) -> None:
    def use() -> Any:
        with tinker.ServiceClient(base_url=stand.url, api_key=KEY, default_headers_overrides=HEADERS) as client:
            sequence = sample(client).sequences[1]
            experts = np.load(io.BytesIO(fetch(stand, sequence.sequence_id).content))
            again = fetch(stand, sequence.sequence_id)
            tokens = [*PROMPT, *sequence.tokens]
            datum = types.Datum(
                model_input=types.ModelInput.from_ints(tokens[:-1]),
                loss_fn_inputs={
                    "target_tokens": types.TensorData.from_numpy(np.array(tokens[1:])),
                    "routed_experts": types.TensorData.from_numpy(experts.astype(np.int64)),
                },
            )
            training = client.create_lora_training_client(base_model=MODEL, rank=4).result()
            training.forward_backward([datum], "cross_entropy").result()
            return experts, again

    experts, again = await asyncio.to_thread(use)
    assert (experts.shape, experts.dtype, experts.max()) == ((len(PROMPT) + 3, 3, 2), np.uint8, 1)
    assert again.status_code == 200
    (_, (_, (datum,))), *_ = [call for call in stand.trainer.calls if call[0] == "ForwardBackward"]
    assert np.array_equal(tensors.decode(datum.loss_inputs["routed_experts"]), experts)


async def test_they_are_asked_for_and_ones_own(stand: Stand) -> None:
    sequence_id = (await stand.sdk(sample)).sequences[0].sequence_id
    without = await asyncio.to_thread(fetch, stand, sequence_id)
    # Experts that this client has fetched may be dropped by now.
    assert without.status_code in (404, 410)
    if without.status_code == 404:
        assert "was sampled without experts; send the header X-Fovea-Routed-Experts: 1" in without.json()["detail"]
    for name in ("a:sample:0:1:0", "nothing", f"{sequence_id}:9"):
        assert (await asyncio.to_thread(fetch, stand, name)).status_code == 404
    assert (await asyncio.to_thread(fetch, stand, sequence_id, "tml-nobody")).status_code == 401
