"""A connection to a server and a model in training, with the model's encoder, learning rate and checkpoints."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

from fovea.runtime.model_files import language_entries, read_json
from fovea.wire.errors import FailedPrecondition, NotFound
from fovea_data.base_model import is_tied
from fovea_data.encoder import Encoder
from fovea_data.picture_tokens import PictureTokens, ask_server, checkpoint_directory, checkpoint_formula
from fovea_data.served_limits import ServedLimits, ask_limits
from fovea_rollout.late_sdk import tinker
from fovea_rollout.loop.learning_rate import FINE_TUNING_RATE, rate_at

logger = logging.getLogger(__name__)

SupportedModel: TypeAlias = "tinker.types.SupportedModel"


class Server:
    """A Tinker server, used through the SDK.

    Args:
        base_url: Address of the server; None reads TINKER_BASE_URL.
        api_key: API key; None reads TINKER_API_KEY.
        progress: See `ask_limits`.

    Raises:
        FailedPrecondition: No server responds.
    """

    def __init__(self, base_url: str | None, api_key: str | None, progress: bool | None = None) -> None:
        self.base_url, self.api_key = base_url, api_key
        self._limits = ask_limits(base_url, api_key, progress)
        self.service = tinker.ServiceClient(base_url=base_url, api_key=api_key)
        self.rest = tinker.RestClient(base_url=base_url, api_key=api_key)

    def model(self, name: str | None) -> SupportedModel:
        """Returns a model by its name; the first model that can be trained if the name is None.

        Raises:
            NotFound: The server does not have the model. The message names the models that it has.
            FailedPrecondition: The server trains no model.
        """
        models = [one for one in self.rest.get_server_capabilities().result().supported_models if one.model_name]
        if name is None:
            trainable = [one for one in models if one.trainable is not False]
            if not trainable:
                raise FailedPrecondition("the server has no model that can be trained")
            return trainable[0]
        for one in models:
            if one.model_name == name:
                return one
        raise NotFound(f"the server has no model {name!r}; it has {[one.model_name for one in models]}", field="model")

    def limits(self, model: SupportedModel) -> ServedLimits:
        """Returns the server's limits for a model."""
        return self._limits.get(str(model.model_name), ServedLimits())


@dataclass(frozen=True)
class Connection:
    """A model in training.

    Attributes:
        server: The server.
        training: Client of the model.
        encoder: Encoder of the model.
        learning_rate: Default learning rate for AdamW, computed from the model's width.
    """

    server: Server
    training: tinker.TrainingClient
    encoder: Encoder
    learning_rate: float

    @classmethod
    def open(
        cls,
        server: Server,
        model: SupportedModel,
        state: str,
        *,
        rank: int,
        seed: int,
        train_unembed: bool | None = None,
        name: str = "",
    ) -> Connection:
        """Creates a LoRA of a model, or continues from a saved state. Raises what the SDK raises.

        Args:
            server: The server.
            model: The base model.
            state: Path of the saved state; empty to create a LoRA.
            rank: Rank of a new LoRA; 0 trains all parameters.
            seed: Seed of a new LoRA.
            train_unembed: Whether a new LoRA adapts the unembedding. None adapts it unless the model ties it to its
                embeddings.
            name: Name of the run, which a live page shows.

        The tokens of pictures are computed from the checkpoint's small files, which are beside the tokenizer. For model
        families without a formula, the server counts them; the client for that is created for the first picture.
        """
        service, base = server.service, str(model.model_name)
        metadata = {"name": name} if name else None
        if state:
            training = service.create_training_client_from_state_with_optimizer(state, user_metadata=metadata).result()
        else:
            if train_unembed is None:
                train_unembed = rank == 0 or not _ties_embeddings(server.limits(model).tokenizer_id or base)
            training = service.create_lora_training_client(
                base_model=base, rank=rank, seed=seed, train_unembed=train_unembed, user_metadata=metadata
            ).result()
        tokenizer = training.get_tokenizer()
        files = checkpoint_directory(str(tokenizer.name_or_path))
        text = language_entries(read_json(files / "config.json"))
        sampling = cache(lambda: service.create_sampling_client(base_model=base).result())
        tokens = PictureTokens(checkpoint_formula(files), lambda picture: ask_server(sampling(), picture))
        encoder = Encoder(tokenizer, tokens, vocabulary=text.get("vocab_size"), max_tokens=model.max_context_length)
        return cls(server, training, encoder, rate_at(text["hidden_size"], FINE_TUNING_RATE))

    def sampling(self, weights: str) -> tinker.SamplingClient:
        """Returns a client that samples from a checkpoint."""
        return self.server.service.create_sampling_client(model_path=weights).result()

    def delete(self, path: str) -> None:
        """Deletes a checkpoint."""
        self.server.rest.delete_checkpoint_from_tinker_path(path).result()


def _ties_embeddings(files: str) -> bool:
    """Returns whether a model ties its unembedding to its embeddings; False if its configuration cannot be read.

    Args:
        files: Directory or hub name of the model's small files.
    """
    from transformers import AutoConfig

    try:
        return is_tied(AutoConfig.from_pretrained(checkpoint_directory(files)))
    except (OSError, ValueError) as error:
        logger.warning("the configuration of %s cannot be read, so the unembedding is trained: %s", files, error)
        return False
