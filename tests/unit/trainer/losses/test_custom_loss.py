"""Traced losses, rebuilt and run: they equal the client's function, and unsupported ones raise a named error."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from fovea.api.v1 import trainer_pb2
from fovea.wire import custom_loss
from fovea.wire.errors import InvalidInput
from fovea_trainer.losses import LossValue, Sandbox, loss_of, loss_worker
from tests.unit.trainer.losses.traced import graph, node, output, ref, square_loss, traced

N, K = 12, 3
Tensors = dict[str, torch.Tensor]
X = ref("logprobs")


@pytest.fixture
def sandbox(roomy: Sandbox) -> Sandbox:
    return roomy


def run(
    sandbox: Sandbox, message: trainer_pb2.CustomLoss, logprobs: torch.Tensor, inputs: Tensors | None = None
) -> LossValue:
    loss = loss_of(trainer_pb2.ForwardBackwardHeader(loss_function="custom", custom_loss=message), sandbox)
    return loss.compute(logprobs, inputs or {})


def policy(logprobs: Any, sampled: Any, advantages: Any, mask: Any) -> Any:
    ratio = torch.exp(logprobs - sampled)
    objective = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    count = mask.sum().clamp(min=1)
    loss = -(objective * mask).sum() / count
    return loss, {"custom/ratio:mean": (ratio * mask).sum() / count, "custom/tokens:sum": count}


def entropy_like(logprobs: Any, weights: Any, beta: Any) -> Any:
    lengths = math.sqrt(logprobs.shape[0]) * logprobs.numel()
    best = torch.max(logprobs, dim=-1).values
    spread = torch.special.entr(logprobs.exp()).sum() + functional.softplus(-best).mean()
    spread = spread - functional.logsigmoid(logprobs[..., 0]).sum()
    loss = (1 - beta) * spread / lengths + (weights * logprobs**2).mean() + logprobs.T.logsumexp(0).std()
    return loss, {"custom/best:mean": best.max()}


def picking(logprobs: Any, target_tokens: Any, mask: Any) -> Any:
    own = logprobs[mask.bool()]
    half = logprobs[: logprobs.shape[0] // 2]
    both = logprobs.unsqueeze(1)[mask.bool(), 0]
    later = torch.where(target_tokens > 3, logprobs, torch.zeros_like(logprobs)).cumsum(0)
    pairs = (half.unsqueeze(0) - half.unsqueeze(1)).abs().triu(1)
    distance = functional.huber_loss(half, torch.full_like(half, -1.0))
    loss = own.mean() + both.std() + later[-1] + distance + pairs.sum() + (-own).topk(2)[0].sum()
    return loss, {"custom/own:sum": own.sum(), "custom/pairs/max:mean": pairs.max()}


CASES: dict[str, tuple[Callable[..., Any], Mapping[str, int], tuple[int, ...], Mapping[str, Any]]] = {
    "policy": (policy, {"logprobs": 1, "sampled": 1, "advantages": 1, "mask": 1}, (N,), {
        "sampled": lambda r: r.normal(size=N) - 2, "advantages": lambda r: r.normal(size=N),
        "mask": lambda r: (r.random(N) > 0.3) * 1.0,
    }),
    "entropy": (entropy_like, {"logprobs": 2, "weights": 2, "beta": 0}, (N, K), {
        "weights": lambda r: r.normal(size=(N, K)), "beta": lambda r: np.array(0.3),
    }),
    "picking": (picking, {"logprobs": 1, "target_tokens": 1, "mask": 1}, (N,), {
        "target_tokens": lambda r: r.integers(0, 9, N), "mask": lambda r: np.resize([1, 0, 1], N),
    }),
}  # fmt: skip


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("case", CASES)
def test_equals_the_function_on_the_client(sandbox: Sandbox, case: str, seed: int) -> None:
    """Value, gradient and metrics are bit-identical: the same operations in the same order."""
    function, ranks, shape, makers = CASES[case]
    random = np.random.default_rng(seed)
    values = -random.exponential(size=shape).astype(np.float32)
    made = {name: make(random) for name, make in makers.items()}
    inputs = {
        name: torch.as_tensor(value.astype(np.int64 if value.dtype.kind == "i" else np.float32))
        for name, value in made.items()
    }
    handle, message = traced(function, ranks)
    mine, theirs = (torch.tensor(values, requires_grad=True) for _ in range(2))
    loss, metrics = handle.graph(theirs, *inputs.values())
    loss.backward()
    value = run(sandbox, message, mine, inputs)
    torch.autograd.backward([value.loss])
    assert value.loss.item() == loss.item()
    assert mine.grad is not None
    assert theirs.grad is not None
    assert torch.equal(mine.grad, theirs.grad)
    assert {key: metric.item() for key, metric in value.metrics.items()} == {
        key: metric.item() for key, metric in metrics.items()
    }


def test_forward_only_needs_no_gradient(sandbox: Sandbox) -> None:
    value = run(sandbox, square_loss(), torch.tensor([-1.0, -2.0]))
    assert value.loss.item() == 5
    assert not value.loss.requires_grad


def test_every_allowed_operation_can_be_called() -> None:
    assert set(loss_worker.FUNCTIONS) == custom_loss.FUNCTIONS
    assert set(loss_worker.METHODS) == custom_loss.METHODS
    assert all(callable(one) for one in (*loss_worker.FUNCTIONS.values(), *loss_worker.METHODS.values()))


def function(name: str, target: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    return node("call_function", name, target, *args, **kwargs)


def method(name: str, target: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    return node("call_method", name, target, *args, **kwargs)


BIG = [2**12, 2**11]
FAILING: dict[str, tuple[list[dict[str, Any]], str]] = {
    "not a scalar": ([function("e", "torch.exp", X)], r"'e' \(torch.exp\) is returned as the loss .*\[4\]"),
    "a number": ([function("s", "getattr", X, "ndim")], "'s' .*is int"),
    "whole numbers": ([method("c", "count_nonzero", X)], "'c' .*int64"),
    "shapes": ([function("b", "torch.add", X, {"tuple": [1, 2]})], r"node 'b' \(torch.add\) failed"),
    "broadcast": ([method("n", "narrow", X, 0, 0, 3), function("a", "operator.add", X, ref("n"))],
                  r"node 'a' \(operator.add\) failed: The size of tensor"),
    "index out of range": ([method("i", "new_full", X, {"tuple": [1]}, 99, dtype={"dtype": "int64"}),
                            function("g", "operator.getitem", X, ref("i"))], "node 'g' .*out of"),
    "index from values": ([function("m", "operator.mul", X, -100), method("l", "long", ref("m")),
                           function("g", "torch.gather", X, 0, ref("l"))], "node 'g' .*out of bounds"),
    "dtype": ([method("i", "long", X), method("n", "mean", ref("i"))], r"node 'n' \(mean\) failed"),
    "infinite": ([function("z", "torch.zeros_like", X), function("d", "operator.truediv", X, ref("z")),
                  method("s", "sum", ref("d"))], r"the loss is -inf; node 'd' \(operator.truediv\) is the first"),
    "not a number": ([function("l", "torch.log", X), method("s", "sum", ref("l"))], r"loss is nan; node 'l'"),
    "gradient": ([function("a", "operator.add", X, 1.0), function("s", "torch.sqrt", ref("a")),
                  method("t", "nansum", ref("s"))], r"gradient at logprobs\[0\] is inf"),
    "detached": ([method("d", "detach", X), method("s", "sum", ref("d"))], "does not depend on logprobs"),
    "constant": ([function("z", "torch.zeros_like", X), method("s", "sum", ref("z"))], "does not depend on logprobs"),
    "metric": ([method("s", "sum", X), output("s", wide="logprobs")], r"metric custom/wide:sum and is \[4\]"),
    "method of a number": ([function("s", "getattr", X, "ndim"), method("t", "sum", ref("s"))], "called on a tensor"),
    "attribute": ([function("s", "getattr", X, "values")], "has no values"),
    "math on tensors": ([method("s", "sum", X), function("m", "math.exp", ref("s"))], "use torch.exp"),
    "repeat": ([method("r", "repeat", X, 10**9), method("s", "sum", ref("r"))], "would make 4000000000 elements"),
    "expand": ([method("u", "unsqueeze", X, 1), method("e", "expand", ref("u"), 4, 2**23)],
               "would make 33554432 elements"),
    "factory": ([method("r", "new_zeros", X, BIG[0], BIG[1]), method("s", "sum", ref("r"))], "8388608 elements"),
    "outer": ([method("a", "new_ones", X, 2**12), method("b", "new_ones", X, 2**12),
               function("o", "torch.outer", ref("a"), ref("b"))], "would make 16777216 elements"),
    "broadcasting": ([method("a", "new_ones", X, 2**12), method("b", "new_ones", X, {"tuple": [2**12, 1]}),
                      function("o", "operator.add", ref("a"), ref("b"))], "would make 16777216 elements"),
    "doubling": ([method("d0", "repeat", X, 2**17), *(
        function(f"d{i + 1}", "torch.cat", [ref(f"d{i}"), ref(f"d{i}")]) for i in range(6)
    )], "would make 8388608 elements"),
    "work": ([method("d0", "repeat", X, 2**19), *(
        function(f"d{i + 1}", "torch.exp", ref(f"d{i}")) for i in range(40)
    )], "more than 134217728 elements"),
    "product": ([method("a", "new_ones", X, {"tuple": [2**10, 2**10]}),
                 function("m", "torch.matmul", ref("a"), ref("a"))], "more than 134217728 elements"),
    "many parts": ([method("a", "new_ones", X, 2**21), function("c", "torch.cat", [ref("a")] * 100)],
                   "would make 209715200 elements"),
    "many picks": ([method("a", "new_ones", X, {"tuple": [1, 2**20]}),
                    function("g", "operator.getitem", ref("a"), [0] * 99)],
                   "would make 103809024 elements"),
    "index select": ([method("a", "new_ones", X, {"tuple": [1, 2**11]}),
                      method("i", "new_zeros", X, 2**12, dtype={"dtype": "int64"}),
                      function("s", "torch.index_select", ref("a"), 0, ref("i"))], "would make 8388608 elements"),
    "quantiles": ([method("a", "new_ones", X, {"tuple": [2**11, 4]}), method("q", "new_ones", X, 2**12),
                   function("s", "torch.quantile", ref("a"), ref("q"), dim=1)], "would make 8388608 elements"),
    "many pieces": ([method("a", "new_ones", X, 2**20), method("u", "unbind", ref("a"))], "into 1048576 parts"),
    "pieces by number": ([function("t", "torch.tensor_split", X, 10**6)], "split a tensor into 1000000 parts"),
    "pieces by name": ([method("t", "tensor_split", X, sections=10**6)], "split a tensor into 1000000 parts"),
    "pieces by value": ([function("f", "torch.full_like", X, 10**6, dtype={"dtype": "int64"}),
                         function("g", "operator.getitem", ref("f"), 0),
                         function("t", "torch.tensor_split", X, ref("g"))], "split a tensor into 1000000 parts"),
    "pieces of nothing": ([method("n", "narrow", X, 0, 0, 0), function("c", "torch.chunk", ref("n"), 10**6)],
                          "split a tensor into 1000000 parts"),
    "pieces again and again": ([method("n", "new_zeros", X, 2**16), *(
        method(f"u{i}", "unbind", ref("n")) for i in range(9)
    )], r"node 'u1' \(unbind\) failed: makes the loss read and write more than 134217728 elements"),
    "tensors in a list": ([function("p", "operator.mul", [X], 10**7)], "accepts tensors and numbers, not list"),
    "text times number": ([function("p", "operator.mul", "sum", 10**9)], "accepts tensors and numbers, not str"),
    "lists of lists": ([function("n0", "operator.getitem", [[X, X]], 0), *(
        function(f"n{i + 1}", "operator.getitem", [[ref(f"n{i}"), ref(f"n{i}")]], 0) for i in range(16)
    )], r"node 'n1' \(operator.getitem\) failed: returns a value of type list"),
    "many arguments": ([method("u", "new_zeros", X, 2**16), method("v", "unbind", ref("u")),
                        function("c", "torch.stack", [ref("v"), ref("v")])], "receives more than 65536 values"),
    "many dimensions": ([method("v", "view", X, [1] * 99 + [4])], "a tensor of 100 dimensions"),
    "factories": ([function("o", "torch.ones", 10**8)], "would make 100000000 elements"),
    "differences": ([method("r", "repeat", X, 2**13), function("d", "torch.diff", ref("r"), n=2**13)],
                    r"'d' \(torch.diff\) failed: makes the loss read and write more than"),
    "rolls": ([method("r", "repeat", X, 2**15), function("d", "torch.roll", ref("r"), [1] * 2000, [0] * 2000)],
              r"'d' \(torch.roll\) failed: makes the loss read and write more than"),
    "medians": ([method("r", "repeat", X, 2**19), *(method(f"m{i}", "median", ref("r")) for i in range(9))],
                r"'m2' \(median\) failed: makes the loss read and write more than"),
    "reductions": ([method("r", "repeat", X, 2**20), *(method(f"m{i}", "sum", ref("r")) for i in range(40))],
                   r"'m9' \(sum\) failed: makes the loss read and write more than"),
    "huge power": ([function("p", "operator.pow", 9, 999999999)], "more than 64 bits"),
    "huge product": ([function("p", "operator.mul", 2**62, 2**62)], "returns a value of type int"),
    "list times number": ([function("p", "operator.mul", [1, 2], 10**9)], "accepts tensors and numbers, not list"),
    "shape times number": ([function("g", "getattr", X, "shape"), function("p", "operator.mul", ref("g"), 10**9)],
                           "accepts tensors and numbers, not Size"),
    "zero division": ([function("p", "operator.truediv", 1, 0)], "node 'p' .*division by zero"),
    "overflow": ([function("p", "math.exp", 1e9)], "node 'p' .*failed"),
}  # fmt: skip


def test_the_backward_pass_counts_as_work(sandbox: Sandbox) -> None:
    chain = [function(f"d{i + 1}", "torch.sigmoid", ref(f"d{i}")) for i in range(12)]
    message = graph(method("d0", "repeat", X, 2**19), *chain, method("s", "sum", ref("d12")), output("s"))
    assert run(sandbox, message, torch.full((4,), -1.0)).loss.isfinite()
    with pytest.raises(InvalidInput, match="more than 134217728 elements"):
        run(sandbox, message, torch.full((4,), -1.0, requires_grad=True))


@pytest.mark.parametrize("case", FAILING)
def test_what_cannot_be_computed_is_named(sandbox: Sandbox, case: str) -> None:
    nodes, words = FAILING[case]
    message = graph(*nodes)
    logprobs = torch.tensor([-1.0, -2.0, -3.0, -0.5], requires_grad=True)
    with pytest.raises(InvalidInput, match=words) as caught:
        run(sandbox, message, logprobs)
    assert caught.value.message.startswith("datum[0] custom loss 'by_hand': ")
    assert caught.value.field == "datum[0]"


def test_config_and_custom_loss_go_with_custom() -> None:
    header = trainer_pb2.ForwardBackwardHeader(loss_function="custom", custom_loss=square_loss())
    header.loss_config["beta"] = 1.0
    with pytest.raises(InvalidInput, match=r"loss_config\.beta is unknown for custom"):
        loss_of(header)
    with pytest.raises(InvalidInput, match="custom_loss is missing"):
        loss_of(trainer_pb2.ForwardBackwardHeader(loss_function="custom"))
    with pytest.raises(InvalidInput, match="is set, but is only allowed with loss_function 'custom'; this is 'ppo'"):
        loss_of(trainer_pb2.ForwardBackwardHeader(loss_function="ppo", custom_loss=square_loss()))
