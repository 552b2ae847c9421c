"""A trainer rank, a gateway or all of Fovea dies: nothing hangs, is lost silently or remains.

This Fovea serves another family than other tests: Qwen2.5-VL, with window attention and patches of 14 pixels. Its
checkpoint has the files of transformers 5: sharded weights, tied embeddings, one file for the processor. Before any
fault, sampler and trainer agree on it.
"""

import asyncio
import multiprocessing
import os
import pathlib
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from unittest import mock

import grpc
import psutil
import pytest
import tinker
from grpc_health.v1 import health_pb2, health_pb2_grpc
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

import fovea_tinyvlm
from benchmarks.running import metric_total
from fovea.runtime import credentials
from tests.e2e.prompts import PromptBuilder, picture
from tests.e2e.stack import Stack, running_stack
from tests.e2e.test_agreement import assert_agree, sampler_logprobs, take_steps, trainer_logprobs
from tests.processes import survivors
from tests.waiting import eventually

START, END = "<|im_start|>user\n<|vision_start|>", "<|vision_end|>What is this?<|im_end|>\n"
CREATED = "fovea_gateway.training.commands: create_model of"
RETURNED = "is restored after"
"""Log lines of the gateway for a created model and for a restored one."""


@pytest.fixture(scope="module")
def saved_again(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The tiny model, loaded and saved again."""
    directory = tmp_path_factory.mktemp("models") / "qwen2_5_vl"
    built = fovea_tinyvlm.ensure("qwen2_5_vl")
    model = AutoModelForImageTextToText.from_pretrained(built)
    assert model.config.tie_word_embeddings
    model.save_pretrained(directory, max_shard_size="1MB")
    AutoProcessor.from_pretrained(built).save_pretrained(directory)
    names = {path.name for path in directory.iterdir()}
    assert {"processor_config.json", "chat_template.jinja", "generation_config.json"} < names
    assert "preprocessor_config.json" not in names
    assert len([name for name in names if name.endswith(".safetensors")]) > 1
    return directory


@pytest.fixture(scope="module")
def fragile(saved_again: pathlib.Path) -> Iterator[Stack]:
    """A separate Fovea to be broken. Its services use mutual TLS, also after each restart.

    It suspends the models of a client that is silent for longer than the SDK's heartbeat interval of 10 s.
    """
    silence = mock.patch.dict(os.environ, {"FOVEA_GATEWAY_SESSION_TTL_S": "15"})
    with silence, running_stack(saved_again, "--tls") as stack:
        yield stack


def train(stack: Stack, seed: int, rounds: int) -> list[float]:
    """Trains a new model with pipelined calls; returns its losses and final scores."""
    builder = PromptBuilder(AutoTokenizer.from_pretrained(stack.model))
    prompts = [builder.build(f"sentence {number} of client {seed}, to be learned") for number in range(3)]
    prompts.append(builder.build("<|vision_start|>", (picture(224, 224), 64), f"<|vision_end|>as {seed} sees it"))
    adam = tinker.AdamParams(learning_rate=1e-2)
    with stack.service_client() as service:
        training = service.create_lora_training_client(base_model=stack.model_name, rank=4, seed=seed).result()
        losses = []
        for number in range(rounds):
            data = [prompt.datum() for prompt in prompts[number % 4 :]]
            losses += [training.forward_backward(data, "cross_entropy") for _ in range(2)]
            training.optim_step(adam)
        scored = training.forward([prompt.datum() for prompt in prompts], "cross_entropy")
        found = [loss.result(timeout=300).metrics["loss:sum"] for loss in losses]
        for output in scored.result(timeout=300).loss_fn_outputs:
            found += output["logprobs"].data
        return [float(value) for value in found]


@pytest.mark.parametrize("name", ["renderer", "sampler", "trainer"])
def test_services_refuse_callers_without_a_certificate(fragile: Stack, name: str) -> None:
    authority = (pathlib.Path(fragile.state["tls_dir"]) / "ca.crt").read_bytes()
    request = health_pb2.HealthCheckRequest()
    for channel in (
        grpc.insecure_channel(fragile.address(name)),
        grpc.secure_channel(
            fragile.address(name), grpc.ssl_channel_credentials(authority), options=credentials.CLIENT_OPTIONS
        ),
    ):
        with channel, pytest.raises(grpc.RpcError) as refused:
            health_pb2_grpc.HealthStub(channel).Check(request, timeout=10)
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE


def test_sampler_and_trainer_agree_on_another_family(fragile: Stack) -> None:
    builder = PromptBuilder(AutoTokenizer.from_pretrained(fragile.model))
    # Patches of 14 pixels, merged 2 x 2: an image token covers 28 x 28 pixels.
    square, wide = (picture(224, 224, 1), 64), (picture(280, 140, 2), 50)
    prompts = {
        "text": builder.build("Some words about nothing in particular, to be scored."),
        "one image": builder.build(START, square, END),
        "two images": builder.build(START, square, "<|vision_end|><|vision_start|>", wide, END),
    }
    with fragile.service_client() as service:
        training = service.create_lora_training_client(base_model=fragile.model_name, rank=8).result()
        base = service.create_sampling_client(base_model=fragile.model_name).result()
        assert_agree(sampler_logprobs(base, prompts), trainer_logprobs(training, prompts))
        take_steps(training, prompts, 3, 5e-3)
        tuned = training.save_weights_and_get_sampling_client().result()
        assert_agree(sampler_logprobs(tuned, prompts), trainer_logprobs(training, prompts))


@pytest.mark.long  # test_chaos.py also kills gateway, rank and launcher, and compares all numbers bit for bit
def test_gateway_and_trainer_killed_again_and_again(fragile: Stack) -> None:
    """Clients of the plain SDK only see a pause: no command is lost or repeated, and all numbers are bit-identical."""
    seeds, rounds, chance = (1, 2, 3), 30, random.Random(12)
    with ThreadPoolExecutor() as pool:
        undisturbed = list(pool.map(lambda seed: train(fragile, seed, rounds), seeds))
        models = fragile.log.read_text().count(CREATED) + len(seeds)
        running = [pool.submit(train, fragile, seed, rounds) for seed in seeds]
        asyncio.run(eventually(lambda: fragile.log.read_text().count(CREATED) >= models, 120))
        for victims in (["gateway"], ["1"], ["gateway", "-1"]):
            time.sleep(chance.uniform(1.0, 3.0))
            returned = fragile.log.read_text().count(RETURNED)
            for victim in victims:
                fragile.kill(victim)
            killed = time.monotonic()
            if victims != ["gateway"]:
                returned += len(seeds)
                asyncio.run(eventually(lambda: fragile.log.read_text().count(RETURNED) >= returned, 120))  # noqa: B023
                print(f"{victims} killed: the trainer has all models again after {time.monotonic() - killed:.1f} s")
        assert not any(each.done() for each in running), "the last kill must interrupt work"
        assert [each.result() for each in running] == undisturbed
    assert "gave another answer" not in fragile.log.read_text()


def train_in_halves(stack: Stack, told: "Queue[list[float]]", go_on: Event) -> None:
    """Trains and samples, waits, and repeats it with the same model and the same unnamed weights."""
    builder = PromptBuilder(AutoTokenizer.from_pretrained(stack.model))
    prompt = builder.build("a notebook whose machine was taken away")
    greedy = tinker.SamplingParams(max_tokens=8, temperature=0.0, stop=[])
    with stack.service_client() as service:
        training = service.create_lora_training_client(base_model=stack.model_name, rank=4, seed=5).result()
        sampling = None
        for half in range(2):
            loss = training.forward_backward([prompt.datum()], "cross_entropy").result().metrics["loss:sum"]
            if half:  # no step has applied the first half's gradients yet
                training.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
            sampling = sampling or training.save_weights_and_get_sampling_client().result()
            sampled = sampling.sample(prompt.model_input, num_samples=1, sampling_params=greedy).result()
            after = training.forward([prompt.datum()], "cross_entropy").result().metrics["loss:sum"]
            told.put([loss, after, *sampled.sequences[0].tokens])
            go_on.wait(200)


def test_a_client_that_was_stopped_for_long_goes_on(fragile: Stack) -> None:
    """Its session is suspended and its trainer killed meanwhile; the client sees neither."""
    context = multiprocessing.get_context("spawn")
    metrics = fragile.state["services"]["gateway"]["metrics"]
    told, go_on = [context.Queue() for _ in range(2)], [context.Event() for _ in range(2)]
    clients = [context.Process(target=train_in_halves, args=(fragile, *each)) for each in zip(told, go_on, strict=True)]
    for client in clients:
        client.start()
    halves = [[each.get(timeout=120)] for each in told]
    stopped = psutil.Process(clients[1].pid)
    stopped.suspend()
    go_on[0].set()  # the other client must not be affected
    halves[0].append(told[0].get(timeout=120))
    clients[0].join(60)
    asyncio.run(eventually(lambda: metric_total(metrics, "fovea_gateway_parked_sessions") >= 1, 120))
    fragile.kill("0")
    stopped.resume()
    go_on[1].set()
    halves[1].append(told[1].get(timeout=120))
    clients[1].join(60)
    assert halves[0] == halves[1]


def test_a_killed_supervisor_leaves_no_process_behind(fragile: Stack) -> None:
    """This includes the trainer's launcher, which the kernel kills with it; `running_stack` checks the same after
    Ctrl-C.
    """
    supervisor = psutil.Process(fragile.state["pid"])
    children = supervisor.children(recursive=True)
    assert len(children) >= 6  # renderer, sampler, engine, launcher, two ranks, gateway
    supervisor.kill()
    assert [process.cmdline() for process in survivors(children, 60)] == []
