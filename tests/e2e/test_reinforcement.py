"""importance_sampling on fresh samples: on-policy, ratios are 1 and the loss is minus the advantages."""

import pytest
import tinker
from transformers import PreTrainedTokenizerBase

from tests.e2e.prompts import PromptBuilder
from tests.e2e.stack import Stack


def datum(
    prompt: tinker.ModelInput, length: int, sequence: tinker.types.SampledSequence, advantage: float
) -> tinker.Datum:
    tokens, logprobs = list(sequence.tokens), list(sequence.logprobs or [])
    padding = [0.0] * (length - 1)
    chunks = [*prompt.chunks, tinker.EncodedTextChunk(tokens=tokens[:-1])]
    count = length - 1 + len(tokens)
    columns: dict[str, tuple[list, str]] = {
        "target_tokens": ([0] * (length - 1) + tokens, "int64"),
        "logprobs": (padding + logprobs, "float32"),
        "advantages": (padding + [advantage] * len(tokens), "float32"),
    }
    return tinker.Datum(
        model_input=tinker.ModelInput(chunks=chunks),
        loss_fn_inputs={
            name: tinker.TensorData(data=data, dtype=dtype, shape=[count]) for name, (data, dtype) in columns.items()
        },
    )


def test_on_policy_ratios_are_one_and_good_draws_become_likelier(
    stack: Stack, service: tinker.ServiceClient, tokenizer: PreTrainedTokenizerBase
) -> None:
    prompt = PromptBuilder(tokenizer).catalogue()["one image"]
    training = service.create_lora_training_client(base_model=stack.model_name, rank=8).result()
    sampling = training.save_weights_and_get_sampling_client().result()
    params = tinker.SamplingParams(max_tokens=10, temperature=1.0, seed=3, stop=[])
    sequences = sampling.sample(prompt.model_input, num_samples=8, sampling_params=params).result().sequences
    assert len({tuple(sequence.tokens) for sequence in sequences}) > 1
    advantages = [1.0 if sequence.tokens == sequences[0].tokens else -1.0 for sequence in sequences]
    data = [
        datum(prompt.model_input, len(prompt.ids), sequence, advantage)
        for sequence, advantage in zip(sequences, advantages, strict=True)
    ]
    expected = -sum(a * len(s.tokens) for a, s in zip(advantages, sequences, strict=True))
    before = training.forward_backward(data, "importance_sampling").result()
    assert before.metrics["loss:sum"] == pytest.approx(expected, abs=2e-3)
    training.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
    assert training.forward(data, "importance_sampling").result().metrics["loss:sum"] < expected - 0.01
