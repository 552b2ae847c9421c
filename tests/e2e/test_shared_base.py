"""One copy of the base for trainer and sampler: they agree, refuse full parameters, and survive each other's death."""

import threading
import time
from collections.abc import Iterator

import pytest
import tinker
from safetensors.torch import load_file
from transformers import AutoTokenizer

import fovea_tinyvlm
from fovea.client.inference import SamplerClient
from fovea.runtime.credentials import SECRET_VARIABLE
from fovea.runtime.hosts import interface_of
from fovea.wire.errors import InvalidInput
from tests.e2e.prompts import PromptBuilder, picture
from tests.e2e.sampler.sender import Sender
from tests.e2e.stack import Stack, running_stack
from tests.e2e.test_agreement import check_model, sampler_logprobs
from tests.families import ensure_family

STEPS = 24


@pytest.fixture(scope="module")
def sharing() -> Iterator[Stack]:
    """Fovea in which the trainer uses the sampler's weights."""
    with running_stack(fovea_tinyvlm.ensure(), "--shared-base") as stack:
        yield stack


def test_sampler_and_trainer_agree(sharing: Stack) -> None:
    prompts = PromptBuilder(AutoTokenizer.from_pretrained(sharing.model)).catalogue()
    with sharing.service_client() as service:
        check_model(sharing, service, 8, 5e-3, prompts)


def test_they_agree_on_experts_that_the_checkpoint_transposes() -> None:
    """Pushed adapters change the experts, too."""
    with running_stack(ensure_family("qwen3_vl_moe"), "--shared-base") as stack, stack.service_client() as service:
        builder = PromptBuilder(AutoTokenizer.from_pretrained(stack.model))
        prompts = {
            "text": builder.build("Some words about nothing in particular, to be scored."),
            "image": builder.build("<|vision_start|>", (picture(224, 224, 1), 64), "<|vision_end|>as it is"),
        }
        check_model(stack, service, 8, 5e-3, prompts)


def test_full_parameters_are_refused(sharing: Stack) -> None:
    with sharing.service_client() as service, pytest.raises(tinker.TinkerError, match="without --shared-base"):
        service.create_lora_training_client(base_model=sharing.model_name, rank=0).result()


async def test_full_pushes_are_refused(sharing: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another trainer could send them: the sampler refuses them before a tensor is sent."""
    monkeypatch.setenv(SECRET_VARIABLE, sharing.secret)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface_of("127.0.0.1") or "lo")
    async with SamplerClient(sharing.address("sampler")) as client:
        sender = await Sender(client).join()
        with pytest.raises(InvalidInput, match="full weights need a sampler without --shared-base"):
            await sender.push("other@1", load_file(sharing.model / "model.safetensors"))


def run(sharing: Stack, is_under_way: threading.Event) -> list[float]:
    """Trains and samples in turns; returns the losses, the samples and the final scores."""
    prompt = PromptBuilder(AutoTokenizer.from_pretrained(sharing.model)).build("one copy of all these weights")
    greedy = tinker.SamplingParams(max_tokens=8, temperature=0.0, stop=[])
    found: list[float] = []
    with sharing.service_client() as service:
        training = service.create_lora_training_client(base_model=sharing.model_name, rank=4, seed=3).result()
        for step in range(STEPS):
            loss = training.forward_backward([prompt.datum()], "cross_entropy")
            training.optim_step(tinker.AdamParams(learning_rate=1e-2)).result(timeout=300)
            found.append(float(loss.result(timeout=300).metrics["loss:sum"]))
            if step % 4 == 3:
                sampling = training.save_weights_and_get_sampling_client().result(timeout=300)
                sampled = sampling.sample(prompt.model_input, num_samples=1, sampling_params=greedy)
                found += sampled.result(timeout=300).sequences[0].tokens
                is_under_way.set()
        scores = sampler_logprobs(sampling, {"prompt": prompt})["prompt"]
        return found + [float(score) for score in scores if score is not None]


@pytest.mark.parametrize("victim", ["sampler", "engine", "trainer"])
def test_a_killed_part_costs_a_run_nothing(sharing: Stack, victim: str) -> None:
    """The trainer restarts with the sampler that owns its memory; a trainer that dies maps the memory again."""
    expected = run(sharing, threading.Event())
    is_under_way, found = threading.Event(), []
    running = threading.Thread(target=lambda: found.append(run(sharing, is_under_way)))
    running.start()
    assert is_under_way.wait(120)
    sampler, trainer = sharing.processes("sampler")[0], sharing.rank(0)
    assert trainer is not None
    {"sampler": sampler, "engine": sampler.children()[0], "trainer": trainer}[victim].kill()
    killed_at = time.monotonic()
    running.join(300)
    print(f"{victim} killed: the run ended {time.monotonic() - killed_at:.1f} s later")
    assert found == [expected]
    assert not trainer.is_running()
    assert sampler.is_running() == (victim == "trainer"), "a sampler outlives its trainer"
