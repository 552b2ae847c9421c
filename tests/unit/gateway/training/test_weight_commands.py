"""Requests that are refused before a trainer gets the model."""

import pytest

from fovea.api.v1 import weights_pb2
from fovea.wire.errors import InvalidInput
from fovea_gateway.training.weight_commands import check_lora


def test_ranks_are_the_trainer_s() -> None:
    check_lora(weights_pb2.LoraConfig(rank=0), 0)
    check_lora(weights_pb2.LoraConfig(rank=8, train_mlp=True), 8)
    with pytest.raises(InvalidInput, match=r"must be 1 \.\. 8, or 0 to train all parameters"):
        check_lora(weights_pb2.LoraConfig(rank=9, train_mlp=True), 8)
    with pytest.raises(InvalidInput, match="is 8, but vLLM has no LoRA for this model; 0 trains all parameters"):
        check_lora(weights_pb2.LoraConfig(rank=8, train_mlp=True), 0)
