"""Loss functions by name. A new loss adds its file and its line here."""

from fovea.wire.errors import InvalidInput
from services.trainer.losses.base import TARGETS, Loss, LossInput, LossValue
from services.trainer.losses.cross_entropy import CrossEntropy
from services.trainer.losses.importance_sampling import ImportanceSampling

__all__ = ["LOSSES", "TARGETS", "Loss", "LossInput", "LossValue", "loss_of"]

LOSSES: dict[str, Loss] = {loss.name: loss for loss in (CrossEntropy(), ImportanceSampling())}


def loss_of(name: str) -> Loss:
    """The loss of that name. Raises InvalidInput naming the known ones."""
    if name not in LOSSES:
        raise InvalidInput(f"loss_function {name!r} is unknown; known: {', '.join(LOSSES)}", field="loss_function")
    return LOSSES[name]
