"""The shape of an adapter, as Tinker's JSON has it."""

from fovea.api.v1 import weights_pb2
from fovea.wire.errors import InvalidInput
from fovea_gateway.http.request_body import Body


class LoraConfig(Body):
    """Shape of an adapter; rank 0 trains all parameters."""

    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


def lora_message(config: LoraConfig, alpha: float, train_vision: bool) -> weights_pb2.LoraConfig:
    """The same on our wire. Raises InvalidInput for numbers that do not fit.

    Args:
        alpha: Which the JSON has not.
        train_vision: Whether the vision tower is adapted beside the language layers.
    """
    if not -(2**31) <= config.rank < 2**31 or (config.seed is not None and not -(2**63) <= config.seed < 2**63):
        raise InvalidInput("lora_config.rank or seed is out of range", field="lora_config")
    return weights_pb2.LoraConfig(
        rank=config.rank,
        alpha=alpha,
        seed=config.seed or 0,
        train_attention=config.train_attn,
        train_mlp=config.train_mlp,
        train_unembedding=config.train_unembed,
        # It extends the two; an adapter of the unembedding alone has nothing in the tower.
        train_vision=train_vision and (config.train_attn or config.train_mlp),
    )
