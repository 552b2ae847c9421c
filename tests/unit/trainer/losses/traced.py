"""Traced losses for tests: from the SDK if it can trace a function, otherwise written by hand."""

import json
from collections.abc import Callable, Mapping
from typing import Any, cast

from tinker.lib.public_interfaces.custom_loss import LossHandle, encode_graph, trace_loss
from tinker.types import CustomLossInputRank

from fovea.api.v1 import trainer_pb2


def traced(function: Callable[..., Any], ranks: Mapping[str, int]) -> tuple[LossHandle, trainer_pb2.CustomLoss]:
    """The SDK's trace of a function: its handle, and the message that the gateway would forward."""
    handle = trace_loss(function, cast(Mapping[str, CustomLossInputRank], ranks), "session")
    graph = encode_graph(handle).model_dump_json().encode()
    return handle, message(handle.name, ranks, graph)


def message(name: str, ranks: Mapping[str, int], graph: bytes) -> trainer_pb2.CustomLoss:
    """The message."""
    inputs = [trainer_pb2.CustomLossInput(name=key, rank=rank) for key, rank in ranks.items()]
    return trainer_pb2.CustomLoss(name=name, inputs=inputs, graph=graph)


def graph(*nodes: dict[str, Any], ranks: Mapping[str, int] | None = None, **changes: Any) -> trainer_pb2.CustomLoss:
    """Returns a handmade loss: placeholders are added; the last of `nodes` is the loss unless there is an output."""
    ranks = ranks or {"logprobs": 1}
    whole = [node("placeholder", name, name) for name in ranks]
    whole += nodes
    if whole[-1]["op"] != "output":
        whole.append(output(whole[-1]["name"]))
    return message("by_hand", ranks, json.dumps({"format": 1, "nodes": whole, **changes}).encode())


def node(op: str, name: str, target: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Returns one node."""
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": kwargs}


def ref(name: str) -> dict[str, str]:
    """Returns a reference."""
    return {"ref": name}


def output(loss: str, **metrics: str) -> dict[str, Any]:
    """Returns the output node; each metric is a sum."""
    listed = {f"custom/{key}:sum": ref(value) for key, value in metrics.items()}
    return node("output", "output", "output", {"tuple": [ref(loss), {"dict": listed}]})


def square_loss(**ranks: int) -> trainer_pb2.CustomLoss:
    """Returns the loss sum logprobs^2, with any declared inputs."""
    ranks = ranks or {"logprobs": 1}
    return graph(
        node("call_method", "squared", "square", ref("logprobs")),
        node("call_method", "total", "sum", ref("squared")),
        ranks=ranks,
    )
