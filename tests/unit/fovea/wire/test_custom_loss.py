"""Graphs of traced losses: the SDK's output is accepted; anything outside the allowed lists is
refused with its name.
"""

import json
import math
from typing import Any

import pytest
import torch
from torch.nn import functional

from fovea.api.v1 import trainer_pb2
from fovea.wire import custom_loss
from fovea.wire.custom_loss import Constant, Ref, parse
from fovea.wire.errors import InvalidInput
from tests.unit.trainer.losses.traced import graph, message, node, output, ref, square_loss, traced


def test_what_the_sdk_writes_is_read() -> None:
    def policy(logprobs: Any, advantages: Any, beta: Any) -> Any:
        ratio = torch.exp(logprobs - advantages).clamp(max=math.inf)
        some = ratio[1:, ...].to(torch.float64).reshape((logprobs.shape[0] - 1,))
        loss = -(some * beta).sum() / math.sqrt(logprobs.shape[0]) + functional.softplus(logprobs).mean()
        return loss, {"custom/ratio:mean": ratio.mean()}

    _, sent = traced(policy, {"logprobs": 1, "advantages": 1, "beta": 0})
    read = parse(sent)
    assert [(given.name, given.rank) for given in read.inputs] == [("logprobs", 1), ("advantages", 1), ("beta", 0)]
    by_name = {one.name: one for one in read.nodes}
    assert by_name["clamp"].kwargs == {"max": math.inf}
    assert by_name["getitem"].args == (Ref("clamp"), (slice(1, None, None), Ellipsis))
    assert by_name["to"].args == (Ref("getitem"), Constant("dtype", "float64"))
    assert by_name["softplus"].target == "torch._C._nn.softplus"
    assert read.loss in (Ref("add"), Ref("add_1"))
    assert list(read.metrics) == ["custom/ratio:mean"]


def _call(target: str, *args: Any, **kwargs: Any) -> trainer_pb2.CustomLoss:
    return graph(node("call_function", "bad", target, *args, **kwargs))


X = ref("logprobs")
REFUSED: dict[str, tuple[trainer_pb2.CustomLoss, str]] = {
    "eval": (_call("builtins.eval", "1"), "calls builtins.eval"),
    "import": (_call("torch.load", X), "calls torch.load"),
    "hub": (_call("torch.hub.load", X), "calls torch.hub.load"),
    "os": (_call("os.system", X), "calls os.system"),
    "dunder": (_call("operator.attrgetter", X), "calls operator.attrgetter"),
    "in place": (graph(node("call_method", "bad", "add_", X, 1)), "method add_"),
    "item": (graph(node("call_method", "bad", "item", X)), "method item"),
    "backward": (graph(node("call_method", "bad", "backward", X)), "method backward"),
    "random": (_call("torch.rand_like", X), "calls torch.rand_like"),
    "attribute": (_call("getattr", X, "grad_fn"), "grad_fn"),
    "dunder attribute": (_call("getattr", X, "__class__"), "__class__"),
    "attribute by default": (_call("getattr", X, "shape", "T"), "allowed attributes are"),
    "computed attribute": (_call("getattr", X, X), "allowed attributes are"),
    "attribute list": (_call("getattr", X, ["shape"]), "allowed attributes are"),
    "constant list": (_call("torch.zeros_like", X, dtype={"dtype": ["float32"]}), "not allowed on the server"),
    "unprintable": (graph(node("call_method", "a\n\ud800", "item", X)), r"\(a\\n\\ud800\) calls the method item"),
    "get_attr": (graph(node("get_attr", "bad", "weights")), "op 'get_attr'"),
    "call_module": (graph(node("call_module", "bad", "linear", X)), "op 'call_module'"),
    "out": (_call("torch.exp", X, out=X), "passes out"),
    "relu in place": (_call("torch.nn.functional.relu", X, inplace=True), "passes inplace"),
    "text": (_call("torch.exp", "/etc/passwd"), "/etc/passwd"),
    "cuda": (_call("torch.zeros_like", X, device={"device": "cuda"}), "device 'cuda'"),
    "complex": (_call("torch.zeros_like", X, dtype={"dtype": "complex64"}), "complex64"),
    "sparse": (_call("torch.zeros_like", X, layout={"layout": "sparse_coo"}), "sparse_coo"),
    "unknown kind": (_call("torch.exp", {"object": "x"}), "object"),
    "two kinds": (_call("torch.exp", {"ref": "logprobs", "tuple": []}), "2 keys"),
    "bad float": (_call("torch.exp", {"float": "1e400"}), "1e400"),
    "large number": (_call("torch.exp", 2**63), "int64 range"),
    "forward reference": (_call("torch.exp", ref("later")), "'later', which is not an earlier node"),
    "itself": (_call("torch.exp", ref("bad")), "'bad', which is not an earlier node"),
    "deep": (_call("torch.exp", [[[[[[[[1]]]]]]]]), "nested deeper"),
    "same name": (graph(node("call_method", "logprobs", "sum", X)), "the same name as an earlier node, 'logprobs'"),
    "late placeholder": (graph(node("placeholder", "x", "x")), "is a placeholder"),
    "no placeholder": (message("m", {"logprobs": 1}, json.dumps(
        {"format": 1, "nodes": [node("call_function", "a", "torch.exp", 1), output("a")]}).encode()), "placeholders"),
    "other placeholder": (message("m", {"logprobs": 1}, json.dumps(
        {"format": 1, "nodes": [node("placeholder", "a", "x"), output("a")]}).encode()), "it is 'x'"),
    "two outputs": (graph(output("logprobs"), output("logprobs")), "op 'output'"),
    "no output": (graph(node("call_method", "a", "sum", X), node("output", "o", "output")), "a loss and metrics"),
    "number as loss": (graph(node("output", "o", "output", {"tuple": [1.0, {"dict": {}}]})), "to a node as loss"),
    "metric name": (graph(node("output", "o", "output", {"tuple": [X, {"dict": {"loss:sum": X}}]})), "'loss:sum'"),
    "metric value": (graph(node("output", "o", "output", {"tuple": [X, {"dict": {"custom/a:sum": 1}}]})), "custom/a"),
    "extra key": (graph(node("call_method", "a", "sum", X) | {"code": "x"}), "keys args, kwargs"),
    "no target": (graph({"op": "call_method", "name": "a"}), "op, name and target"),
    "args": (graph({"op": "call_method", "name": "a", "target": "sum", "args": "abc"}), "not a list"),
    "kwargs": (graph({"op": "call_method", "name": "a", "target": "sum", "kwargs": [1]}), "not an object"),
    "format": (graph(node("call_method", "a", "sum", X), format=2), "format 1"),
    "not json": (message("m", {"logprobs": 1}, b"{"), "is not JSON"),
    "nan": (message("m", {"logprobs": 1}, b'{"format": 1, "nodes": [NaN]}'), "NaN"),
    "nested json": (message("m", {"logprobs": 1}, b"[" * 200_000), "is not JSON"),
    "no nodes": (message("m", {"logprobs": 1}, b'{"format": 1, "nodes": []}'), "2 to 512 nodes"),
    "many nodes": (graph(*(node("call_method", f"n{i}", "sum", X) for i in range(600))), "2 to 512 nodes"),
    "large": (message("m", {"logprobs": 1}, b" " * 300_000), "300000 bytes"),
    "no inputs": (message("m", {}, b"{}"), "0 entries"),
    "many inputs": (square_loss(logprobs=1, **{f"i{i}": 1 for i in range(16)}), "17 entries"),
    "no logprobs": (square_loss(x=1), "the first must be logprobs"),
    "rank of logprobs": (square_loss(logprobs=0), "rank 0; it must be 1 to 2"),
    "rank": (square_loss(logprobs=1, x=3), r"inputs\[1\] \(x\) has rank 3; it must be 0 to 2"),
    "input name": (square_loss(logprobs=1, X=1), "is named 'X'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_allowed_is_named(case: str) -> None:
    sent, words = REFUSED[case]
    with pytest.raises(InvalidInput, match=words) as caught:
        parse(sent)
    assert caught.value.message.startswith("custom loss ")
    assert caught.value.message.isprintable()
    assert caught.value.field


def test_duplicate_inputs_are_refused() -> None:
    sent = square_loss()
    sent.inputs.append(sent.inputs[0])
    with pytest.raises(InvalidInput, match="names must be unique"):
        parse(sent)


def test_the_lists_hold_nothing_that_writes_or_draws() -> None:
    operations = custom_loss
    assert not [name for name in operations.METHODS if name.endswith("_") or "random" in name or "rand" in name]
    assert not [name for name in operations.FUNCTIONS if name.endswith("_") and name not in _OPERATOR_NAMES]
    assert not operations.METHODS & {"item", "numpy", "tolist", "backward", "apply_", "map_", "register_hook", "cuda"}


_OPERATOR_NAMES = {"operator.and_", "operator.or_"}
