"""Real samplers behind EndpointSlices of a real API server join, leave and die under load without a lost request."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tinker
from transformers import AutoTokenizer

import fovea_tinyvlm
from benchmarks.client import take_step
from benchmarks.running import metric_total
from deploy.cluster.cluster import Cluster
from tests.e2e.prompts import Prompt
from tests.e2e.stack import API_KEY
from tests.k8s.cluster import fresh_namespace
from tests.k8s.fleet import MODEL_NAME, Fleet, own_address
from tests.k8s.load import Load, Tokens, greedy, image_prompts, wait_for_samplers
from tests.service_process import ServiceProcess

pytestmark = pytest.mark.slow

_RETRIES = "fovea_gateway_sample_retries_total"
_SERVED = "fovea_sampler_requests_total"
_STEPS = 20
_PROMPTS = 24


@pytest.fixture(scope="module")
def fleet(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Three samplers, of which the first is an endpoint."""
    if not own_address():
        pytest.skip("this machine has no address but loopback ones, which EndpointSlices may not have")
    with (
        fresh_namespace(cluster) as namespace,
        Fleet(cluster, namespace, tmp_path_factory.mktemp("fleet")).running(samplers=3) as fleet,
    ):
        wait_for_samplers(1, fleet.metrics)
        yield fleet


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    """Prompts with one image each."""
    return image_prompts(_PROMPTS)


@pytest.fixture(scope="module")
def sampling(fleet: Fleet, prompts: list[Prompt]) -> Iterator[tinker.SamplingClient]:
    """Samples from an adapter with other answers than the base model."""
    with tinker.ServiceClient(base_url=fleet.base_url, api_key=API_KEY) as service:
        training = service.create_lora_training_client(base_model=MODEL_NAME, rank=8).result()
        for _ in range(_STEPS):
            take_step(training, [taught(prompt) for prompt in prompts[:4]], 1e-2)
        yield training.save_weights_and_get_sampling_client().result()


@pytest.fixture(scope="module")
def expected(fleet: Fleet, sampling: tinker.SamplingClient, prompts: list[Prompt]) -> list[Tokens]:
    """The adapter's answer to each prompt, which differs from the base model's."""
    with tinker.ServiceClient(base_url=fleet.base_url, api_key=API_KEY) as service:
        base = service.create_sampling_client(base_model=MODEL_NAME).result()
        answers = [(greedy(sampling, prompt.model_input), greedy(base, prompt.model_input)) for prompt in prompts]
    assert all(told != known for told, known in answers)
    return [told for told, _ in answers]


def taught(prompt: Prompt) -> tinker.Datum:
    """Returns a datum of the prompt and an answer, with weights on the answer only."""
    answer = AutoTokenizer.from_pretrained(fovea_tinyvlm.ensure()).encode("a tabby cat", add_special_tokens=False)
    targets = [*prompt.ids[1:], *answer]
    weights = [0.0] * (len(prompt.ids) - 1) + [1.0] * len(answer)
    return tinker.Datum(
        model_input=prompt.model_input.append(tinker.EncodedTextChunk(tokens=answer[:-1])),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData(data=targets, dtype="int64", shape=[len(targets)]),
            "weights": tinker.TensorData(data=weights, dtype="float32", shape=[len(weights)]),
        },
    )


def served(fleet: Fleet, sampler: ServiceProcess) -> float:
    """Returns the number of requests that a sampler has finished."""
    return metric_total(fleet.metrics_of(sampler), _SERVED)


def check(load: Load, expected: list[Tokens]) -> None:
    """Checks that every answer arrived and came from the requested weights."""
    assert load.failures == []
    assert set(load.answers) == set(enumerate(expected))


def test_one_to_three_to_one(
    fleet: Fleet, sampling: tinker.SamplingClient, prompts: list[Prompt], expected: list[Tokens]
) -> None:
    _, *late = fleet.samplers
    retried = metric_total(fleet.metrics, _RETRIES)
    with Load(sampling, [prompt.model_input for prompt in prompts]).running() as load:
        load.wait(100)
        fleet.join(*late)
        wait_for_samplers(3, fleet.metrics)
        load.wait(500)
        fleet.leave(*late)
        wait_for_samplers(1, fleet.metrics)
        load.wait(100)
    check(load, expected)
    shares = [served(fleet, sampler) for sampler in fleet.samplers]
    assert all(shares), "each must take part"
    assert metric_total(fleet.metrics, _RETRIES) == retried
    print(f"1 to 3 to 1: {len(load.answers)} answers, 0 failed, 0 retried; by sampler {shares}")


def test_kill_one_of_three(
    fleet: Fleet, sampling: tinker.SamplingClient, prompts: list[Prompt], expected: list[Tokens]
) -> None:
    *others, last = fleet.samplers
    fleet.join(*fleet.samplers)
    wait_for_samplers(3, fleet.metrics)
    retried = metric_total(fleet.metrics, _RETRIES)
    with Load(sampling, [prompt.model_input for prompt in prompts]).running() as load:
        load.wait(700)
        assert served(fleet, last) > 0
        last.kill()
        load.wait(700)
        fleet.leave(last)
        wait_for_samplers(len(others), fleet.metrics)
        load.wait(200)
    check(load, expected)
    again = metric_total(fleet.metrics, _RETRIES) - retried
    assert again < 0.01 * len(load.answers)
    print(f"one of three killed: {len(load.answers)} answers, 0 lost, {again:.0f} retried")
