"""A sampler, a trainer rank or all of Fovea dies: nothing hangs, nothing is lost in silence, nothing stays behind."""

import asyncio
import pathlib
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import grpc
import psutil
import pytest
import tinker
from grpc_health.v1 import health_pb2, health_pb2_grpc
from transformers import AutoTokenizer

import tinyvlm
from benchmarks.running import metric_total
from fovea.runtime import tls
from tests.e2e.prompts import PromptBuilder, picture
from tests.e2e.stack import Stack, running_stack
from tests.processes import survivors
from tests.waiting import eventually


@pytest.fixture(scope="module")
def fragile() -> Iterator[Stack]:
    """A Fovea of its own, to be broken; its services talk over mutual TLS, and do so again after each start."""
    with running_stack(tinyvlm.ensure(), "--tls") as stack:
        yield stack


def processes(stack: Stack, service: str) -> list[psutil.Process]:
    """A service's process and everything below it."""
    supervisor = psutil.Process(stack.state["pid"])
    for child in supervisor.children():
        with suppress(psutil.NoSuchProcess):  # killed a moment ago
            if {service, f"services.{service}"} & set(child.cmdline()):
                return [child, *child.children(recursive=True)]
    return []


def train(stack: Stack, seed: int, rounds: int) -> list[float]:
    """The losses of a model of its own, each call sent before the one before it has ended."""
    builder = PromptBuilder(AutoTokenizer.from_pretrained(stack.model))
    prompts = [builder.build(f"sentence {number} of client {seed}, to be learned") for number in range(4)]
    adam = tinker.AdamParams(learning_rate=1e-2)
    with stack.service_client() as service:
        training = service.create_lora_training_client(base_model=stack.model_name, rank=4, seed=seed).result()
        losses = []
        for number in range(rounds):
            data = [prompt.datum() for prompt in prompts[: 1 + number % 4]]
            losses += [training.forward_backward(data, "cross_entropy") for _ in range(2)]
            training.optim_step(adam)
        return [loss.result(timeout=300).metrics["loss:sum"] for loss in losses]


@pytest.mark.parametrize("name", ["renderer", "sampler", "trainer"])
def test_nobody_talks_to_a_service_without_a_certificate(fragile: Stack, name: str) -> None:
    authority = (pathlib.Path(fragile.state["tls_dir"]) / "ca.crt").read_bytes()
    request = health_pb2.HealthCheckRequest()
    for channel in (
        grpc.insecure_channel(fragile.address(name)),
        grpc.secure_channel(fragile.address(name), grpc.ssl_channel_credentials(authority), options=tls.CLIENT_OPTIONS),
    ):
        with channel, pytest.raises(grpc.RpcError) as refused:
            health_pb2_grpc.HealthStub(channel).Check(request, timeout=10)
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE


def test_a_gateway_killed_again_and_again(fragile: Stack) -> None:
    seeds, rounds, chance = (1, 2, 3), 25, random.Random(12)
    with ThreadPoolExecutor() as pool:
        undisturbed = list(pool.map(lambda seed: train(fragile, seed, rounds), seeds))
        running = [pool.submit(train, fragile, seed, rounds) for seed in seeds]
        for _ in range(3):
            time.sleep(chance.uniform(1.0, 3.0))
            while not (found := processes(fragile, "gateway")):
                time.sleep(0.1)
            found[0].kill()
        assert not any(each.done() for each in running), "the last kill met no work"
        assert [each.result() for each in running] == undisturbed


def test_a_sampler_killed_while_sampling(fragile: Stack) -> None:
    builder = PromptBuilder(AutoTokenizer.from_pretrained(fragile.model))
    prompt = builder.build("<|vision_start|>", (picture(224, 224), 64), "<|vision_end|>Tell a long story.")
    with fragile.service_client() as service:
        training = service.create_lora_training_client(base_model=fragile.model_name, rank=4).result()
        data = [prompt.datum()]
        training.forward_backward(data, "cross_entropy").result()
        training.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
        sampling = training.save_weights_and_get_sampling_client().result()
        greedy = tinker.SamplingParams(max_tokens=40, temperature=0.0, stop=[])
        expected = sampling.sample(prompt.model_input, num_samples=1, sampling_params=greedy).result()
        expected_loss = training.forward(data, "cross_entropy").result().metrics["loss:sum"]

        long = tinker.SamplingParams(max_tokens=600, temperature=1.0, stop=[])
        in_flight = [sampling.sample(prompt.model_input, num_samples=1, sampling_params=long) for _ in range(8)]
        metrics = fragile.state["services"]["sampler"]["metrics"]
        asyncio.run(eventually(lambda: metric_total(metrics, "fovea_sampler_requests_in_flight") == len(in_flight), 60))
        for process in processes(fragile, "sampler"):
            process.kill()

        # Training goes on meanwhile, undisturbed.
        assert training.forward(data, "cross_entropy").result().metrics["loss:sum"] == pytest.approx(expected_loss)
        for future in in_flight:
            try:
                assert len(future.result(timeout=150).sequences[0].tokens) == 600
            except tinker.RequestFailedError as error:
                assert "sampler" in str(error)  # noqa: PT017
        # The restarted sampler is given the snapshot again, exactly.
        again = sampling.sample(prompt.model_input, num_samples=1, sampling_params=greedy).result()
        assert again.sequences[0].tokens == expected.sequences[0].tokens
        assert again.sequences[0].logprobs == pytest.approx(expected.sequences[0].logprobs, abs=1e-5)


def test_a_trainer_rank_killed(fragile: Stack) -> None:
    builder = PromptBuilder(AutoTokenizer.from_pretrained(fragile.model))
    data = [builder.build("some words to learn from, again and again").datum()] * 8
    with fragile.service_client() as service:
        training = service.create_lora_training_client(base_model=fragile.model_name, rank=4).result()
        training.forward_backward(data, "cross_entropy").result()
        ranks = [p for p in processes(fragile, "trainer") if "RANK" in p.environ()]
        victim = next(p for p in ranks if p.environ()["RANK"] == "1" and "services.trainer" in " ".join(p.cmdline()))
        futures = [training.forward_backward(data * 8, "cross_entropy") for _ in range(4)]
        victim.kill()
        start = time.monotonic()
        failures = []
        for future in futures:
            try:
                future.result(timeout=60)
            except tinker.RequestFailedError as error:
                failures.append(str(error))
        assert failures
        assert time.monotonic() - start < 30
        assert all("weights since the last save are gone" in failure for failure in failures), failures
        with pytest.raises(tinker.RequestFailedError, match="trainer"):
            training.optim_step(tinker.AdamParams()).result(timeout=60)
    # The trainer is started again and takes new models.
    with fragile.service_client() as service:
        training = wait_for_model(service, fragile)
        assert training.forward_backward(data, "cross_entropy").result().metrics["loss:sum"] > 0


def wait_for_model(service: tinker.ServiceClient, stack: Stack) -> tinker.TrainingClient:
    deadline = time.monotonic() + 90
    while True:
        try:
            return service.create_lora_training_client(base_model=stack.model_name, rank=4).result()
        except tinker.RequestFailedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(1)


def test_a_killed_supervisor_leaves_no_process_behind(fragile: Stack) -> None:
    """Nor does the trainer's launcher, which the kernel kills with it, nor Ctrl-C: `running_stack` looks at that."""
    supervisor = psutil.Process(fragile.state["pid"])
    children = supervisor.children(recursive=True)
    assert len(children) >= 6  # renderer, sampler, engine, launcher, two ranks, gateway
    supervisor.kill()
    assert [process.cmdline() for process in survivors(children, 60)] == []
