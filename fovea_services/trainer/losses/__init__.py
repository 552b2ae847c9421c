"""Loss functions by name. A new loss adds its file and its line here."""

from fovea.api.v1 import trainer_pb2
from fovea.wire.errors import InvalidInput
from fovea_services.trainer.losses.cispo import Cispo
from fovea_services.trainer.losses.cross_entropy import CrossEntropy
from fovea_services.trainer.losses.custom import Custom
from fovea_services.trainer.losses.dro import Dro
from fovea_services.trainer.losses.gspo import Gspo
from fovea_services.trainer.losses.importance_sampling import ImportanceSampling
from fovea_services.trainer.losses.loss import TARGETS, Loss, LossInput, LossValue
from fovea_services.trainer.losses.ppo import Ppo
from fovea_services.trainer.losses.sandbox import Sandbox

__all__ = ["LOSSES", "LOSS_NAMES", "TARGETS", "Loss", "LossInput", "LossValue", "Sandbox", "loss_of"]

LOSSES: dict[str, type[Loss]] = {loss.name: loss for loss in (CrossEntropy, ImportanceSampling, Ppo, Cispo, Dro, Gspo)}
LOSS_NAMES = (*LOSSES, Custom.name)


def loss_of(header: trainer_pb2.ForwardBackwardHeader, sandbox: Sandbox | None = None) -> Loss:
    """The loss that a call asks for, with its settings; a traced one can be computed if there is a sandbox.

    Raises InvalidInput naming the known losses, the known settings, or what is wrong with a traced loss.
    """
    name = header.loss_function
    if header.HasField("custom_loss") != (name == Custom.name):
        missing = "is missing: it goes" if name == Custom.name else "is set, but goes"
        raise InvalidInput(f"custom_loss {missing} with loss_function 'custom', this is {name!r}", field="custom_loss")
    if name == Custom.name:
        return Custom(header.loss_config, header.custom_loss, sandbox)
    if name not in LOSSES:
        raise InvalidInput(f"loss_function {name!r} is unknown; known: {', '.join(LOSS_NAMES)}", field="loss_function")
    return LOSSES[name](header.loss_config)
