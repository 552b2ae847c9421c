"""Small micro-batches on padded, recorded passes equal an ordinary pass, for any adapter."""

# ruff: noqa: N806 -- the suffix of a tensor's name is its shape

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from fovea_trainer.batches.datum_decoding import Datum
from fovea_trainer.batches.micro_batch import Batch, Documents, Placement
from fovea_trainer.batches.vision_cache import VisionOutput
from fovea_trainer.model.lora import LoraInjector, LoraSettings, LoraWeights
from fovea_trainer.model.lora_linear import unembedding_of
from fovea_trainer.model.model_family import family_of
from fovea_trainer.model.packed_model import PackedModel
from fovea_trainer.model.small_passes import SmallPasses, _Size, padded_size
from fovea_trainer.model.weight_reading import read_weights

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
SETTINGS = LoraSettings(4, 8.0, 0, True, True, True, False)


def _passes(device: str, kept_bytes: list[int] | None = None) -> SmallPasses:
    """Returns passes that are recorded on a GPU; adds the bytes of recorded passes to `kept_bytes`."""
    module, injector, _ = _loaded(device)
    kept = [] if kept_bytes is None else kept_bytes
    return SmallPasses(module, injector, 2048, True, lambda _: device == "cuda", lambda _: True, kept.append)


@cache
def _loaded(device: str) -> tuple[PackedModel, LoraInjector, Any]:
    """Returns a small Qwen3-VL with random weights: float32 on a CPU, bfloat16 on a GPU, where
    float32 is not recorded.
    """
    torch.manual_seed(0)
    text = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 32,
        "num_key_value_heads": 2, "vocab_size": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5]},
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64,
        "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64,
    }  # fmt: skip
    config = Qwen3VLConfig(text_config=text, vision_config=vision, image_token_id=250, video_token_id=251)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    family = family_of("qwen3_vl")
    with TemporaryDirectory() as folder:
        Qwen3VLForConditionalGeneration(config).to(dtype).save_pretrained(folder)
        hf = family.build(config, dtype)
        read_weights(hf, Path(folder), torch.device(device))
    module = PackedModel(family, None, hf, None, 128, torch.float32)
    assert module.requires_grad_(False).can_be_recorded == (device == "cuda")
    targets = list(family.lora_targets(hf))
    return module, LoraInjector(targets), targets


def _adapter(device: str, number: int) -> LoraWeights:
    module, _, targets = _loaded(device)
    weights = LoraWeights(SETTINGS, targets, torch.device(device), module.hf.dtype)
    with torch.no_grad():
        weights.flat.add_(
            torch.randn(len(weights.flat), generator=torch.Generator().manual_seed(number)).to(device) / 9
        )
    return weights


def _batch(device: str, lengths: list[int], images: bool, seed: int = 0) -> tuple[Batch, dict[str, VisionOutput]]:
    module = _loaded(device)[0]
    generator, count = torch.Generator().manual_seed(seed), sum(lengths)
    text, levels = module.hf.config.get_text_config(), module.deepstack_levels
    assert levels, "this family adds image features to its first layers"
    tokens_T = torch.randint(0, 200, (count,), generator=generator)
    positions = torch.cat([torch.arange(length) for length in lengths]).expand(3, -1)
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    targets_T1 = torch.randint(0, 200, (count, 1), generator=generator)
    placement, cached = None, {}
    if images:
        index_M = torch.tensor([1, 2, 3, lengths[0] + 1])
        parts = [torch.randn(4, text.hidden_size, generator=generator).to(device) for _ in range(1 + levels)]
        placement, cached = Placement(("cat",), index_M.to(device)), {"cat": VisionOutput(parts[0], tuple(parts[1:]))}
    datums = tuple(Datum.blank(length) for length in lengths)
    tensors = (one.to(device) for one in (tokens_T, positions, bounds, targets_T1))
    tokens_T, positions, bounds, targets_T1 = tensors
    documents = Documents(bounds, max(lengths))
    return Batch(tokens_T, positions, documents, targets_T1, (), None, placement, datums), cached


def _joined(device: str, parts: list[Any], rows: int) -> Any:
    """Concatenates batches in slots of `rows` tokens, each filled up with one more document."""
    tokens, positions, lengths, targets, indices, cached = [], [], [], [], [], {}
    for slot, (batch, outputs) in enumerate(parts):
        missing = rows - len(batch.tokens_T)
        tokens += [batch.tokens_T, batch.tokens_T.new_zeros(missing)]
        positions += [batch.positions, torch.arange(missing, device=batch.positions.device).expand(3, -1)]
        targets += [batch.targets_TK, batch.targets_TK.new_zeros(missing, 1)]
        lengths += [*torch.diff(batch.documents.bounds).tolist(), missing]
        for name, output in outputs.items():
            indices.append(batch.placement.index_M + slot * rows)
            cached[f"{name} {slot}"] = output
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    placement = Placement(tuple(cached), torch.cat(indices)) if cached else None
    documents = Documents(bounds, max(lengths))
    datums = tuple(Datum.blank(length) for length in lengths)
    return (
        Batch(torch.cat(tokens), torch.cat(positions, 1), documents, torch.cat(targets), (), None, placement, datums),
        cached,
    )


def _direction(logprobs: Tensor) -> Tensor:
    """Returns gradients of the log-probabilities; half of them are zero, as for prompts."""
    values = torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(3)).relu()
    return values.to(logprobs.device)


def _found(device: str, passes: SmallPasses | None, weights: LoraWeights, batch: Any) -> tuple[Tensor, Tensor]:
    module, injector, _ = _loaded(device)
    packed, cached = batch
    weights.flat_grad.zero_()
    injector.activate(weights)
    if passes is None:
        logprobs = module(packed, unembedding_of(weights.pairs), dict(cached))
    else:
        logprobs = passes.logprobs(packed, weights, dict(cached), 1.0)
    torch.autograd.backward([(logprobs * _direction(logprobs)).sum()])
    return logprobs.detach().clone(), weights.flat_grad.clone()


@pytest.mark.parametrize("images", [False, True], ids=["text", "images"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_small_pass_is_an_ordinary_one(device: str, images: bool) -> None:
    passes = _passes(device)
    tolerances = {"cpu": (1e-5, 1e-5), "cuda": (0.1, 0.05)}[device]
    for lengths in ([7, 70, 20], [7, 70, 21], [130]):
        batch = _batch(device, lengths, images and len(lengths) > 1)
        for number in range(3):  # the first pass of a size is run, the second one is recorded, the third is replayed
            weights = _adapter(device, number)
            expected, expected_gradient = _found(device, None, weights, batch)
            found, gradient = _found(device, passes, weights, batch)
            assert found.shape == expected.shape
            assert (found - expected).abs().max() <= tolerances[0]
            assert (gradient - expected_gradient).norm() <= tolerances[1] * expected_gradient.norm()


@pytest.mark.parametrize("device", DEVICES)
def test_a_replayed_pass_is_equal_to_the_bit_and_mixes_no_adapters(device: str) -> None:
    kept_bytes: list[int] = []
    passes = _passes(device, kept_bytes)
    batches = [_batch(device, [40, 60], images=True, seed=seed) for seed in (0, 1)]
    adapters = [_adapter(device, number) for number in range(2)]
    first = [_found(device, _passes(device), adapter, batch) for adapter, batch in zip(adapters, batches, strict=True)]
    for _ in range(3):
        for adapter, batch, (logprobs, gradient) in zip(adapters, batches, first, strict=True):
            found = _found(device, passes, adapter, batch)
            assert torch.equal(found[0], logprobs)
            if device == "cpu":  # flash attention adds gradients of keys in no fixed order
                assert torch.equal(found[1], gradient)
            assert (found[1] - gradient).norm() <= 1e-3 * gradient.norm()
    assert bool(kept_bytes) == (device == "cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine on which no graph can be recorded")
def test_where_no_graph_can_be_recorded_passes_run_without(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, injector, _ = _loaded("cpu")
    monkeypatch.setitem(vars(module), "can_be_recorded", True)
    passes = SmallPasses(module, injector, 2048, True, lambda _: True, lambda _: True, lambda _: None)
    weights, batch = _adapter("cpu", 0), _batch("cpu", [30], images=False)
    first, *others = [_found("cpu", passes, weights, batch) for _ in range(3)]
    for logprobs, gradient in others:
        assert torch.equal(logprobs, first[0])
        assert torch.equal(gradient, first[1])
    assert sum("no CUDA graph" in record.message for record in caplog.records) == 1


def test_activations_are_not_recomputed_after_a_pass_that_did_so() -> None:
    """A recomputation would run without the stand-in's adapter."""
    passes, module = _passes("cpu"), _loaded("cpu")[0]
    weights, batch = _adapter("cpu", 0), _batch("cpu", [30], images=False)
    first = _found("cpu", passes, weights, batch)
    module.set_recompute(1.0)
    again = _found("cpu", passes, weights, batch)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])


def test_gradients_add_up_over_passes() -> None:
    passes = _passes("cpu")
    weights, (batch, cached) = _adapter("cpu", 0), _batch("cpu", [30], images=False)
    once = _found("cpu", passes, weights, (batch, cached))[1]
    logprobs = passes.logprobs(batch, weights, dict(cached), 1.0)
    torch.autograd.backward([(logprobs * _direction(logprobs)).sum()])
    torch.testing.assert_close(weights.flat_grad, 2 * once)


def test_without_gradients_nothing_is_added() -> None:
    passes = _passes("cpu")
    weights, (batch, cached) = _adapter("cpu", 0), _batch("cpu", [30], images=False)
    expected = _found("cpu", passes, weights, (batch, cached))[0]
    weights.flat_grad.zero_()
    with torch.no_grad():
        assert torch.equal(passes.logprobs(batch, weights, dict(cached), 1.0), expected)
    assert not weights.flat_grad.any()


@pytest.mark.parametrize("lengths", [[1], [64], [65], [32, 32], [1, 1, 1, 200], [2048], [5] * 300])
def test_padding_fills_the_size_with_documents_that_are_not_too_long(lengths: list[int]) -> None:
    batch, _ = _batch("cpu", lengths, images=False)
    size = _Size.of(batch, False, 1.0)
    count = sum(lengths)
    assert count <= size.tokens <= max(64, count + max(63, count // 8))
    bounds = size.bounds(batch.documents.bounds, count)
    assert len(bounds) == size.documents + 1
    assert bounds[: len(lengths) + 1].tolist() == batch.documents.bounds.tolist()
    assert bounds[-1] == size.tokens
    assert 0 <= torch.diff(bounds).min() <= torch.diff(bounds).max() <= size.longest


def test_sizes_are_few() -> None:
    assert len({padded_size(count) for count in range(1, 8193)}) < 80


@pytest.mark.parametrize("images", [False, True], ids=["text", "images"])
@pytest.mark.parametrize("device", DEVICES)
def test_calls_of_several_adapters_share_a_pass(device: str, images: bool) -> None:
    """Each slot equals an ordinary pass with its adapter, bit for bit, whatever the other slots contain."""
    passes, rows, slots = _passes(device), 128, 4
    tolerances = {"cpu": (1e-5, 1e-5), "cuda": (0.1, 0.05)}[device]
    lengths = [[7, 70, 20], [100], [64, 32], [30, 31]]
    parts = [_batch(device, own, images and len(own) > 1, seed) for seed, own in enumerate(lengths)]
    adapters: list[Any] = [_adapter(device, number) for number in range(slots)]
    expected = [_found(device, None, adapter, part) for adapter, part in zip(adapters, parts, strict=True)]
    empty = (_batch(device, [1], images=False)[0], {})
    assert passes.slots_of(adapters[0]) >= slots

    def shared(present: list[int]) -> list[tuple[Tensor, Tensor]]:
        batch, cached = _joined(device, [parts[slot] if slot in present else empty for slot in range(slots)], rows)
        own = [adapters[slot] if slot in present else None for slot in range(slots)]
        for adapter in adapters:
            adapter.flat_grad.zero_()
        logprobs = passes.shared_logprobs(batch, own, cached, 1.0)
        weighted = []
        for slot in present:
            part = logprobs[slot * rows : slot * rows + sum(lengths[slot])]
            weighted.append((part * _direction(part)).sum())
        torch.autograd.backward([torch.stack(weighted).sum()])
        passes.add_gradients(own)
        starts = [(slot, slot * rows) for slot in present]
        return [
            (logprobs[start : start + sum(lengths[slot])].detach(), adapters[slot].flat_grad.clone())
            for slot, start in starts
        ]

    whole = shared([0, 1, 2, 3])
    for (found, gradient), (logprobs, by_itself) in zip(whole, expected, strict=True):
        assert (found - logprobs).abs().max() <= tolerances[0]
        assert (gradient - by_itself).norm() <= tolerances[1] * by_itself.norm()
    for present in ([0, 1, 2, 3], [2], [0, 3]):
        for slot, (found, gradient) in zip(present, shared(present), strict=True):
            assert torch.equal(found, whole[slot][0])
            if device == "cpu":  # flash attention adds gradients of keys in no fixed order
                assert torch.equal(gradient, whole[slot][1])
            assert (gradient - whole[slot][1]).norm() <= 1e-3 * gradient.norm()


@pytest.mark.parametrize("device", DEVICES)
def test_a_slot_has_the_same_bits_whatever_the_longest_document_of_the_others(device: str) -> None:
    """A repeated call has fillers as neighbours, which are as long as its own documents."""
    passes, adapters = _passes(device), [_adapter(device, number) for number in range(2)]
    assert passes.slots_of(adapters[0]) >= 2
    own, count = _batch(device, [30, 31, 32, 32, 2], images=False, seed=1), 127

    def beside(lengths: list[int]) -> tuple[int, Tensor, Tensor]:
        batch, cached = _joined(device, [_batch(device, lengths, images=False), own], 128)
        adapters[1].flat_grad.zero_()
        logprobs = passes.shared_logprobs(batch, adapters, cached, 1.0)[128 : 128 + count]
        torch.autograd.backward([(logprobs * _direction(logprobs)).sum()])
        passes.add_gradients([None, adapters[1]])
        return batch.documents.longest, logprobs.detach(), adapters[1].flat_grad.clone()

    for _ in range(3):  # on a GPU the second pass of a size is recorded
        (longest, logprobs, gradient), (shorter, again, gradient_again) = beside([120]), beside([32, 32, 32])
        assert (longest, shorter) == (120, 32)
        assert logprobs.equal(again)
        if device == "cpu":  # flash attention adds gradients of keys in no fixed order
            assert gradient.equal(gradient_again)
