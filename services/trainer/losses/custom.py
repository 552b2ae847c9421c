"""A loss that a client traced, rebuilt from its graph.

It runs on the CPU, on copies of a datum's log-probabilities: what goes wrong there (an index out of range, say) is a
Python error, while on a GPU it would be the end of the process. What comes back to the model is the gradient.
"""

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from fovea.api.v1 import trainer_pb2
from fovea.wire import custom_loss, loss_operations
from fovea.wire.custom_loss import Argument, Constant, Graph, Node, Ref
from fovea.wire.errors import InvalidInput
from services.trainer.losses import operations
from services.trainer.losses.base import Loss, LossInput, LossValue
from services.trainer.losses.costs import Meter, RefusedError

_CONSTANTS: dict[tuple[str, str], Any] = {
    (kind, text): torch.device(text) if kind == "device" else getattr(torch, text)
    for kind, texts in loss_operations.CONSTANTS.items()
    for text in texts
}


class Custom(Loss):
    """The sum over datums of a traced function's scalar.

    A datum may bring inputs that the graph does not read: the SDK sends data to a traced loss as it is.
    """

    name = "custom"
    takes_others = True

    def __init__(self, given: Mapping[str, float], message: trainer_pb2.CustomLoss) -> None:
        super().__init__(given)
        self._graph = custom_loss.parse(message)
        first, *others = self._graph.inputs
        self.target_ranks = (first.rank,)
        self.inputs = tuple(LossInput(given.name, rank=given.rank) for given in others)

    def compute(self, logprobs: Tensor, inputs: Mapping[str, Tensor]) -> LossValue:
        needs_gradient = logprobs.requires_grad
        leaf = logprobs.detach().cpu().requires_grad_(needs_gradient)
        given = {custom_loss.LOGPROBS: leaf, **{name: value.cpu() for name, value in inputs.items()}}
        run = _Run(self._graph, given)
        loss = run.loss()
        metrics = {key: run.metric(key).to(logprobs.device) for key in self._graph.metrics}
        value = loss.detach().to(logprobs)
        if needs_gradient:
            gradient = run.gradient(loss, leaf).to(logprobs)
            # Worth nothing, but for its gradient.
            value = value + (gradient * (logprobs - logprobs.detach())).sum()
        return LossValue(value, metrics)


class _Run:
    """One evaluation. Every failure is an InvalidInput that names the node."""

    def __init__(self, graph: Graph, inputs: Mapping[str, Tensor]) -> None:
        self._graph = graph
        self._values: dict[str, Any] = {}
        self._nodes = {node.name: node for node in graph.nodes}
        self._meter = Meter()
        for node in graph.nodes:
            self._values[node.name] = inputs[node.target] if node.op == "placeholder" else self._execute(node)

    def loss(self) -> Tensor:
        """The scalar, finite and of a floating type."""
        node = self._nodes[self._graph.loss.node]
        value = self._values[node.name]
        if not isinstance(value, Tensor) or value.ndim or not value.is_floating_point():
            what = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            self._refuse(f"{node} is returned as the loss and is {what}; it must be a floating scalar tensor")
        if not torch.isfinite(value):
            self._refuse(f"the loss is {value.item()}; {self._first_not_finite()} is the first that is not finite")
        return value

    def metric(self, key: str) -> Tensor:
        """A metric, float64 scalar."""
        node = self._nodes[self._graph.metrics[key].node]
        value = self._values[node.name]
        if isinstance(value, bool | int | float):
            return torch.tensor(float(value), dtype=torch.float64)
        if not isinstance(value, Tensor) or value.numel() != 1:
            what = str(list(value.shape)) if isinstance(value, Tensor) else type(value).__name__
            self._refuse(f"{node} is returned as metric {key} and is {what}; it must be a scalar tensor")
        return value.detach().reshape(()).double()

    def gradient(self, loss: Tensor, leaf: Tensor) -> Tensor:
        """d loss / d logprobs, finite."""
        if not loss.requires_grad:
            self._refuse("the loss does not depend on logprobs, so it has no gradient; detach() cuts it off too")
        try:
            (found,) = torch.autograd.grad(loss, leaf, allow_unused=True)
        except RuntimeError as error:
            self._refuse(f"its gradient cannot be computed: {_first_line(error)}")
        if found is None:
            self._refuse("the loss does not depend on logprobs, so it has no gradient; detach() cuts it off too")
        if not torch.isfinite(found).all():
            place = torch.nonzero(~torch.isfinite(found))[0].tolist()
            self._refuse(f"its gradient at logprobs{place} is {found[tuple(place)].item()}; the loss is {loss.item()}")
        return found

    def _execute(self, node: Node) -> Any:
        args = tuple(self._resolve(argument) for argument in node.args)
        kwargs = {key: self._resolve(argument) for key, argument in node.kwargs.items()}
        try:
            if node.op == "call_function":
                return operations.call(operations.FUNCTIONS[node.target], node.target, args, kwargs, self._meter)
            if not args or not isinstance(args[0], Tensor):
                raise RefusedError("must be called on a tensor")
            return operations.call(operations.METHODS[node.target], node.target, args, kwargs, self._meter)
        except Exception as error:  # What a client's function raises is the client's, whatever it is.
            self._refuse(f"{node} failed: {_first_line(error)}")

    def _resolve(self, argument: Argument) -> Any:
        match argument:
            case Ref(name):
                return self._values[name]
            case Constant(kind, text):
                return _CONSTANTS[kind, text]
            case list():
                return [self._resolve(item) for item in argument]
            case tuple():
                return tuple(self._resolve(item) for item in argument)
            case dict():
                return {key: self._resolve(item) for key, item in argument.items()}
            case slice():
                return slice(*(self._resolve(item) for item in (argument.start, argument.stop, argument.step)))
        return argument

    def _first_not_finite(self) -> str:
        for node in self._graph.nodes:
            value = self._values[node.name]
            if isinstance(value, Tensor) and value.is_floating_point() and not torch.isfinite(value).all():
                return str(node)
        return "its sum"

    def _refuse(self, problem: str) -> NoReturn:
        raise InvalidInput(f"custom loss {self._graph.name!r}: {problem}")


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300] or type(error).__name__
