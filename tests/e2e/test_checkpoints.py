"""Saved state is restored: training continues as if uninterrupted, and saved weights sample elsewhere."""

import httpx
import pytest
import tinker
import torch
from safetensors.torch import load, save
from transformers import PreTrainedTokenizerBase

from fovea_conformance.adapters import ADAPTER, download
from tests.e2e.prompts import Prompt, PromptBuilder, max_difference
from tests.e2e.stack import API_KEY, Stack
from tests.e2e.test_agreement import assert_agree, sampler_logprobs, take_steps, trainer_logprobs


@pytest.fixture(scope="module")
def prompts(tokenizer: PreTrainedTokenizerBase) -> dict[str, Prompt]:
    catalogue = PromptBuilder(tokenizer).catalogue()
    return {name: catalogue[name] for name in ("text", "one image")}


@pytest.mark.parametrize(("rank", "rate"), [(8, 5e-3), (0, 5e-4)])
def test_resumed_training_equals_uninterrupted_training(
    stack: Stack, prompts: dict[str, Prompt], rank: int, rate: float
) -> None:
    with stack.service_client() as service:
        training = service.create_lora_training_client(base_model=stack.model_name, rank=rank).result()
        take_steps(training, prompts, 2, rate)
        path = training.save_state(f"half-way-{rank}").result().path
        take_steps(training, prompts, 2, rate)
        uninterrupted = trainer_logprobs(training, prompts)
    with stack.service_client() as service:
        resumed = service.create_training_client_from_state_with_optimizer(path).result()
        take_steps(resumed, prompts, 2, rate)
        scores = trainer_logprobs(resumed, prompts)
    for name in prompts:
        assert max_difference(uninterrupted[name], scores[name]) <= 1e-5, name
    with stack.service_client() as service:
        forgetful = service.create_training_client_from_state(path).result()
        take_steps(forgetful, prompts, 2, rate)
        fresh_optimizer = trainer_logprobs(forgetful, prompts)
    # A fresh optimizer has no moments and its steps differ, so the moments above were really restored.
    assert max(max_difference(uninterrupted[name], fresh_optimizer[name]) for name in prompts) > 1e-3


def test_named_weights_sample_from_another_session(stack: Stack, prompts: dict[str, Prompt]) -> None:
    with stack.service_client() as service:
        training = service.create_lora_training_client(base_model=stack.model_name, rank=8).result()
        take_steps(training, prompts, 2, 5e-3)
        trained = trainer_logprobs(training, prompts)
        path = training.save_weights_for_sampler("kept").result().path
    assert path.startswith("tinker://")
    with stack.service_client() as service:
        sampling = service.create_sampling_client(model_path=path).result()
        assert_agree(sampler_logprobs(sampling, prompts), trained)


def test_a_name_that_is_taken_is_refused_quickly(stack: Stack) -> None:
    with stack.service_client() as service:
        training = service.create_lora_training_client(base_model=stack.model_name, rank=4).result()
        training.save_state("taken").result()
        with pytest.raises(tinker.RequestFailedError, match="taken"):
            training.save_state("taken").result()
        training.save_state("taken", overwrite=True).result()


def test_a_state_loads_into_a_model_at_once_and_later(stack: Stack, prompts: dict[str, Prompt]) -> None:
    with stack.service_client() as service:
        training = service.create_lora_training_client(base_model=stack.model_name, rank=4).result()
        take_steps(training, prompts, 1, 5e-3)
        path = training.save_state("loaded").result().path
        wanted = trainer_logprobs(training, prompts)
        other = service.create_lora_training_client(base_model=stack.model_name, rank=4).result()
        for _ in range(2):
            other.load_state(path).result()
            assert max(max_difference(wanted[name], trainer_logprobs(other, prompts)[name]) for name in prompts) <= 1e-5
            take_steps(other, prompts, 1, 5e-3)
        wider = service.create_lora_training_client(base_model=stack.model_name, rank=8).result()
        with pytest.raises(tinker.RequestFailedError, match="has LoRA rank 4"):
            wider.load_state(path).result()


def upload(stack: Stack, files: dict[str, bytes], rank: int) -> str:
    """Uploads as SDK 0.39 does, which 0.38 cannot."""
    api = httpx.Client(base_url=f"{stack.base_url}/api/v1/", headers={"X-API-Key": API_KEY}, timeout=60)
    body = {"base_model": stack.model_name, "lora_config": {"rank": rank}}
    begun = api.post("external_weights_upload_start", json=body).raise_for_status().json()
    for name, content in files.items():
        httpx.put(begun["urls"][name], content=content).raise_for_status()
    done = api.post("external_weights_upload_finish", json={"upload_id": begun["upload_id"]})
    return str(done.raise_for_status().json()["tinker_path"])


def test_an_adapter_from_elsewhere_is_trained_on(stack: Stack, prompts: dict[str, Prompt]) -> None:
    """An uploaded export is the same model. An adapter of some modules, in half precision, leaves
    the others unchanged.
    """
    with stack.service_client() as service:
        training = service.create_lora_training_client(base_model=stack.model_name, rank=4).result()
        take_steps(training, prompts, 2, 5e-3)
        wanted = trainer_logprobs(training, prompts)
        exported = training.save_weights_external("to-be-uploaded").result().path
        files = download(tinker.RestClient(base_url=stack.base_url, api_key=API_KEY), exported)
        for path in (exported, upload(stack, files, 4)):
            again = service.create_training_client_from_state(path).result()
            assert trainer_logprobs(again, prompts) == wanted, path
        take_steps(again, prompts, 1, 5e-3)
        assert_agree(
            sampler_logprobs(again.save_weights_and_get_sampling_client().result(), prompts),
            trainer_logprobs(again, prompts),
        )
        tensors = load(files[ADAPTER])
        part = {name: tensor.half() for name, tensor in tensors.items() if ".q_proj." in name or ".v_proj." in name}
        zeroed = {name: part.get(name, torch.zeros_like(tensor)).float() for name, tensor in tensors.items()}
        scores = [
            trainer_logprobs(service.create_training_client_from_state(path).result(), prompts)
            for path in (upload(stack, files | {ADAPTER: save(own)}, 4) for own in (part, zeroed))
        ]
        assert scores[0] == scores[1]
        assert max(max_difference(wanted[name], scores[0][name]) for name in prompts) > 1e-3
        module = next(iter(part)).rpartition(".lora_")[0]
        for wrong, words in (
            (
                {f"{module}x.lora_{half}.weight": part[f"{module}.lora_{half}.weight"] for half in "AB"},
                "does not train",
            ),
            ({f"{module}.lora_{half}.weight": part[f"{module}.lora_{half}.weight"] / 0 for half in "AB"}, "not finite"),
            (
                {name: torch.full_like(tensor.float(), 1e30) for name, tensor in part.items()},
                "the limit is 8188",
            ),
            ({name: tensor[..., :4, :4] for name, tensor in part.items()}, "the model needs"),
        ):
            content = save({name: tensor.contiguous() for name, tensor in wrong.items()})
            if words in ("does not train", "the model needs"):  # the header says so, before any tensor is read
                with pytest.raises(httpx.HTTPStatusError) as refused:
                    upload(stack, files | {ADAPTER: content}, 4)
                assert words in refused.value.response.text
                continue
            path = upload(stack, files | {ADAPTER: content}, 4)
            with pytest.raises(tinker.RequestFailedError, match=words):
                service.create_training_client_from_state(path).result()


def test_copies_live_without_their_source(stack: Stack, prompts: dict[str, Prompt]) -> None:
    """Through bare HTTP, because the SDK's own copy_weights only knows projects."""
    with stack.service_client() as service:
        training = service.create_lora_training_client(base_model=stack.model_name, rank=4).result()
        take_steps(training, prompts, 2, 5e-3)
        wanted = trainer_logprobs(training, prompts)
        sources = [
            training.save_state("copied").result().path,
            training.save_weights_for_sampler("copied").result().path,
        ]
        session_id = sources[0].split("/")[2].partition(":")[0]
        with httpx.Client(base_url=f"{stack.base_url}/api/v1/", headers={"X-API-Key": API_KEY}, timeout=60) as http:
            copies = []
            for number, source in enumerate(sources, start=5):
                body = {"source_path": source, "session_id": session_id, "model_seq_id": number}
                answer = http.post("copy_weights", json=body)
                assert answer.status_code == 200, answer.text
                copies.append(answer.json()["tinker_path"])
                run, segment, name = source.removeprefix("tinker://").split("/")
                http.delete(f"training_runs/{run}/checkpoints/{segment}/{name}").raise_for_status()
        resumed = service.create_training_client_from_state(copies[0]).result()
        resumed_scores = trainer_logprobs(resumed, prompts)
        for name in prompts:
            assert max_difference(wanted[name], resumed_scores[name]) <= 1e-5, name
        sampling = service.create_sampling_client(model_path=copies[1]).result()
        assert_agree(sampler_logprobs(sampling, prompts), wanted)
