"""Renames the fields in error messages for gRPC clients, since the use cases use REST's names."""

import re
from collections.abc import Mapping

from fovea.wire.errors import FoveaError
from fovea_gateway.sessions.future import Kind

_NAMES = {
    "adam_params": "adam",
    "age_encryption_recipients": "age_recipients",
    "lora_config": "lora",
    "loss_fn": "loss_function",
    "loss_fn_config": "loss_config",
    "loss_fn_config.loss_id": "custom_loss_id",
    "loss_fn_inputs": "loss_inputs",
    "model_input": "input",
    "num_samples": "sample_count",
    "prompt_alt_tokens_k": "alt_token_count",
    "sampling_params": "params",
    "target_prompt_logprobs": "target_table",
    "topk_prompt_logprobs": "top_prompt_logprobs",
    "topk_sample_logprobs": "top_sample_logprobs",
    "train_attn": "train_attention",
    "train_unembed": "train_unembedding",
    "ttl_seconds": "ttl_s",
}
"""The protobuf name of each field that has another name in REST."""

_OF_COMMAND: Mapping[Kind | None, Mapping[str, str]] = {
    None: {"request_id": "future_id"},
    Kind.CREATE_MODEL: {"path": "from_path"},
    Kind.FORWARD: {"data": "datum"},
    Kind.FORWARD_BACKWARD: {"data": "datum"},
    Kind.SAVE_STATE: {"path": "name"},
    Kind.SAVE_FOR_SAMPLER: {"path": "name", "kind": "inflight"},
    Kind.SAVE_EXTERNAL: {"path": "name"},
}
"""Field names that are also English words, by command. They are replaced only where a message begins with them."""

_LISTED = "|".join(re.escape(name) for name in sorted(_NAMES, key=len, reverse=True))
_NAME = re.compile(rf"(?<![\w/'\"])(?:{_LISTED})(?![\w/'\"])")
"""Matches a field name, unless the message quotes it."""

_DATUM = re.compile(r"\bdata(?=\[\d)")


def named(error: FoveaError, kind: Kind | None = None) -> FoveaError:
    """Returns the same error with its fields named as in the protos.

    Args:
        kind: The kind of the command that failed, if it is known.
    """
    own = _OF_COMMAND.get(kind, {})
    return type(error)(_renamed(error.message, own), error.field and _renamed(error.field, own), **error.metadata)


def _renamed(text: str, own: Mapping[str, str]) -> str:
    first, space, rest = text.partition(" ")
    text = _NAME.sub(lambda found: _NAMES[found[0]], own.get(first, first) + space + rest)
    return _DATUM.sub("datum", text)
