"""The losses of forward_backward calls: the built-in functions (loss_functions.py) and traced ones (custom.py)."""

from fovea.api.v1 import trainer_pb2
from fovea.wire.errors import InvalidInput
from fovea_trainer.losses.custom import Custom, Sandbox
from fovea_trainer.losses.loss_functions import LOSSES, TARGETS, Loss, LossInput, LossValue

__all__ = ["LOSSES", "LOSS_NAMES", "TARGETS", "Loss", "LossInput", "LossValue", "Sandbox", "loss_of"]

LOSS_NAMES = (*LOSSES, Custom.name)


def loss_of(header: trainer_pb2.ForwardBackwardHeader, sandbox: Sandbox | None = None) -> Loss:
    """Returns the loss of a call with its settings.

    Args:
        header: The call's header.
        sandbox: Evaluates a traced loss; without it such a loss can be checked but not computed.

    Raises:
        InvalidInput: The loss is unknown, a setting is unknown, or a traced loss is invalid.
    """
    name = header.loss_function
    if header.HasField("custom_loss") != (name == Custom.name):
        missing = "is missing, but is required" if name == Custom.name else "is set, but is only allowed"
        raise InvalidInput(f"custom_loss {missing} with loss_function 'custom'; this is {name!r}", field="custom_loss")
    if name == Custom.name:
        return Custom(header.loss_config, header.custom_loss, sandbox)
    if name not in LOSSES:
        raise InvalidInput(f"loss_function {name!r} is unknown; known: {', '.join(LOSS_NAMES)}", field="loss_function")
    return LOSSES[name](header.loss_config)
