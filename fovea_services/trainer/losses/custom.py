"""A loss function that a client traced.

It is evaluated on the CPU in a separate process with limits on time and memory (sandbox.py), so a failure affects only
this call. The process returns the gradient of the log-probabilities, which then flows back into the model.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fovea.api.v1 import trainer_pb2
from fovea.wire import custom_loss
from fovea.wire.errors import InvalidInput
from fovea_services.trainer.losses.frames import Answer, Failure, Request
from fovea_services.trainer.losses.loss import Loss, LossInput, LossValue, of_datum
from fovea_services.trainer.losses.sandbox import Sandbox, Stopped


class Custom(Loss):
    """The sum over datums of a traced function's scalar.

    A datum may have inputs that the graph does not read, because the SDK sends data to a traced loss unchanged.

    Args:
        given: Settings.
        message: The traced loss.
        sandbox: Evaluates the loss; required for computing.
    """

    name = "custom"
    takes_others = True

    def __init__(self, given: Mapping[str, float], message: trainer_pb2.CustomLoss, sandbox: Sandbox | None) -> None:
        super().__init__(given)
        self._message = message
        self._graph = custom_loss.parse(message)
        self._sandbox = sandbox
        self.limit_time(sandbox.timeout_s if sandbox else None)
        first, *others = self._graph.inputs
        self.target_ranks = (first.rank,)
        self.inputs = tuple(LossInput(given.name, rank=given.rank) for given in others)

    def compute(self, logprobs: Tensor, inputs: Mapping[str, Tensor]) -> LossValue:
        (value,) = self.compute_each([0], [logprobs], [inputs])
        return value

    def compute_each(
        self, indices: Sequence[int], logprobs: Sequence[Tensor], inputs: Sequence[Mapping[str, Tensor]]
    ) -> list[LossValue]:
        backward = logprobs[0].requires_grad
        datums = [[row, *(given[one.name] for one in self.inputs)] for row, given in zip(logprobs, inputs, strict=True)]
        request = Request(self._message.SerializeToString(), datums, len(self._graph.metrics), backward)
        answer = self._evaluate(request, indices)
        device = logprobs[0].device
        losses, metrics, gradients = (
            torch.from_numpy(found).to(device) for found in (answer.losses, answer.metrics, answer.gradients)
        )
        if backward:
            own = torch.split(gradients, [row.numel() for row in logprobs])
            # This term is zero, but has the gradient that the worker computed.
            flows = [(one.view(row.shape) * (row - row.detach())).sum() for one, row in zip(own, logprobs, strict=True)]
            losses = losses + torch.stack(flows)
        return [
            LossValue(loss, dict(zip(self._graph.metrics, found, strict=True)))
            for loss, found in zip(losses, metrics, strict=True)
        ]

    def _evaluate(self, request: Request, indices: Sequence[int]) -> Answer:
        assert self._sandbox is not None, "only ranks compute losses"
        assert self.seconds_left is not None
        answer, seconds = self._sandbox.evaluate(request, self.seconds_left)
        self.limit_time(max(self.seconds_left - seconds, 0.0))
        match answer:
            case Failure(place, message):
                raise of_datum(indices[place], InvalidInput(message))
            case Stopped(place, node, reason):
                nodes = self._graph.nodes
                where = f"{nodes[node]}" if 0 <= node < len(nodes) else "its gradient"
                index = indices[place] if 0 <= place < len(indices) else indices[0]
                raise of_datum(index, InvalidInput(custom_loss.described(self._graph, f"{where} {reason}")))
        return answer
