"""What is served here."""

from fovea.api.v1 import gateway_pb2
from gateway.replicas.renderers import Renderers
from gateway.replicas.samplers import Samplers
from gateway.replicas.trainer_link import TrainerLink


class Capabilities:
    """The served model and its limits, as the services state them."""

    def __init__(self, model_name: str, renderers: Renderers, samplers: Samplers, trainer: TrainerLink) -> None:
        self._model_name = model_name
        self._renderers, self._samplers, self._trainer = renderers, samplers, trainer

    async def get(self) -> gateway_pb2.ServedModel:
        """Raises Unavailable until a renderer was seen."""
        renderer = await self._renderers.info()
        limits = [renderer.max_context_length]
        limits += [info.max_context_length for info in (self._samplers.info, self._trainer.info) if info is not None]
        return gateway_pb2.ServedModel(
            name=self._model_name,
            max_context_length=min(limit for limit in limits if limit),
            supports_images=renderer.supports_images,
            max_lora_rank=self._trainer.info.max_lora_rank if self._trainer.info is not None else 0,
        )
