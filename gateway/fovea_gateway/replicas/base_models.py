"""The served base models. Maps the name of each to its renderers, samplers, snapshots and trainers.

Texts of tokens come from a tokenizer file on this machine, if there is one; nothing is downloaded.
"""

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from fovea.api.v1 import logs_pb2
from fovea.api.v1.weights_pb2 import LoraConfig
from fovea.runtime.credentials import Redactor
from fovea.runtime.processes import RECENT, LogLine
from fovea.wire.errors import FailedPrecondition, FoveaError, InvalidInput, NotFound, Unavailable
from fovea_gateway.replicas.renderers import Renderers
from fovea_gateway.replicas.replicas import Peer, ReplicaLeft, TrainerInfo, TrainerLink, find_unlike
from fovea_gateway.replicas.samplers import Sampler, Samplers
from fovea_gateway.replicas.snapshot_pushes import Snapshots

logger = logging.getLogger(__name__)

_CHECK_S = 60.0
"""Deadline for a trainer to read the header of an adapter from storage, in seconds."""
_TOKENIZER_FILE = "tokenizer.json"
_CHARACTER_TOKENS = 4
_LOG_LINES = 300
_OWN_NAME = "gateway"


class Trainers:
    """The trainers of one base model: none if it is served for sampling only. Models can move between them.

    They must have the same model files, the same maximum rank of an adapter and, if there are several, one recovery
    storage.

    Args:
        addresses: host:port of each.
        wait_s: Seconds that a call waits for a trainer that went away.
    """

    def __init__(self, addresses: Sequence[str], wait_s: float) -> None:
        self.links = [TrainerLink(address, wait_s, self._check) for address in addresses]

    def __bool__(self) -> bool:
        return bool(self.links)

    @property
    def up(self) -> list[TrainerLink]:
        """The trainers that accept calls."""
        return [link for link in self.links if link.up]

    @property
    def info(self) -> TrainerInfo | None:
        """The info of a trainer, of one that is up if there is one; None until one has answered."""
        return next((link.info for link in (*self.up, *self.links) if link.info is not None), None)

    def holder(self, instance_id: str) -> TrainerLink | None:
        """Returns the trainer with this instance id, or None."""
        return next((link for link in self.links if instance_id and link.instance_id == instance_id), None)

    def check_files(self, who: str, files: Mapping[str, str]) -> None:
        """Raises FailedPrecondition, which names the file, if another service has different model files."""
        if unlike := self.find_unlike(files):
            link = next(link for link in (*self.up, *self.links) if link.info is not None)
            raise FailedPrecondition(
                f"{who} has another {unlike} than the trainer at {link.address}: give all services the same model"
            )

    def find_unlike(self, files: Mapping[str, str]) -> str:
        """Returns the name of a model file in which another service differs from the trainers, or an empty text.

        Until a trainer has answered, no file differs.
        """
        return find_unlike(self.info.model_files if self.info is not None else {}, files)

    def _check(self, link: TrainerLink, info: TrainerInfo) -> None:
        """Raises FailedPrecondition if a trainer could not continue models of the others, Unavailable if it is not
        known yet.
        """
        if len(self.links) == 1:
            return
        who = f"the trainer at {link.address}"
        if not info.keeps_recovery:
            raise FailedPrecondition(f"{who} has no --recovery: several trainers need one shared recovery storage")
        if not info.recovery_store:
            raise Unavailable(f"{who} has not read its recovery storage yet")
        other = next((other for other in self.up if other is not link and other.info is not None), None)
        if other is None or other.info is None:
            return
        if unlike := find_unlike(other.info.model_files, info.model_files):
            raise FailedPrecondition(
                f"{who} has another {unlike} than the trainer at {other.address}: give all trainers of a base model "
                "the same model"
            )
        if other.info.recovery_store != info.recovery_store:
            raise FailedPrecondition(
                f"{who} has another recovery storage than the trainer at {other.address}: give all trainers of a base "
                "model the same shared --recovery, so that they can take over each other's models"
            )
        if other.info.max_lora_rank != info.max_lora_rank:
            raise FailedPrecondition(
                f"{who} allows rank {info.max_lora_rank}, the trainer at {other.address} {other.info.max_lora_rank}: "
                "give all trainers of a base model the same --max-lora-rank"
            )


@dataclass(frozen=True)
class BaseModel:
    """One base model.

    Attributes:
        name: The name that clients use.
        tokenizer_id: The tokenizer that clients should load.
        snapshots: The snapshots trained from this base model. They are pushed only to its own samplers.
        trainers: Empty if the base model is served for sampling only.
        is_sampled: Whether it has samplers, up or not. If not, it is served for training only.
    """

    name: str
    tokenizer_id: str
    renderers: Renderers
    samplers: Samplers
    snapshots: Snapshots
    trainers: Trainers
    is_sampled: bool = True

    def up_samplers(self) -> list[Sampler]:
        """Returns the samplers that currently accept requests."""
        return self.samplers.up

    async def move_followers(self, snapshot_id: str) -> None:
        """Loads newer full weights where requests that follow their model run, so that these continue with them.

        If that fails, the next sample of the snapshot loads it.
        """

        async def move(sampler: Sampler) -> None:
            try:
                async with sampler.weights_lock.hold(snapshot_id, follows=True):
                    logger.info("requests in sampler %s continue with %s", sampler.address, snapshot_id)
            except (FoveaError, ReplicaLeft) as error:
                logger.warning("sampler %s did not get %s: %s", sampler.address, snapshot_id, error)

        followed = [sampler for sampler in self.samplers.up if sampler.weights_lock.is_followed_by(snapshot_id)]
        with self.snapshots.using(snapshot_id):
            await asyncio.gather(*map(move, followed))

    @property
    def max_context_length(self) -> int:
        """The context length of its samplers in tokens; 0 until a sampler has answered."""
        return self.samplers.info.max_context_length if self.samplers.info else 0


class BaseModels:
    """All served base models, in the order of the settings. Call `start` before use.

    Args:
        models: At least one base model. The first is the default for requests that need not name one.
    """

    def __init__(self, models: Sequence[BaseModel]) -> None:
        self._by_name = {model.name: model for model in models}
        self.default = models[0]

    def __iter__(self) -> Iterator[BaseModel]:
        return iter(self._by_name.values())

    @property
    def trainers(self) -> list[TrainerLink]:
        """The trainers of all base models."""
        return [link for model in self for link in model.trainers.links]

    def peers(self) -> dict[str, Peer]:
        """Returns all services behind the gateway by names that people understand, such as `sampler 2`."""
        found: dict[str, Peer] = {}
        for model in self:
            end = f" of {model.name}" if len(self._by_name) > 1 else ""
            kinds: tuple[Sequence[Peer], ...] = model.renderers.members, model.samplers.members, model.trainers.links
            for peers in kinds:
                for number, peer in enumerate(peers, 1):
                    found[f"{peer.service}{f' {number}' if len(peers) > 1 else ''}{end}"] = peer
        return found

    async def read_logs(self, redactor: Redactor, service: str, level: int, text: str) -> dict[str, Any]:
        """Returns the newest log lines of all services, this one included, in the order of their times, the names of
        the services, and the reasons why some did not answer.

        Args:
            redactor: Removes the gateway's secrets. The other services remove theirs.
            service: The name of the only service wanted; empty for all.
            level: The least level, as `logging` numbers it.
            text: A text that a line contains, compared without case.
        """
        peers, lines, failures = self.peers(), list[dict[str, Any]](), dict[str, str]()

        async def read(name: str) -> None:
            asked = level, text, _LOG_LINES
            found: Iterable[LogLine | logs_pb2.LogLine]
            try:
                if name == _OWN_NAME:
                    found = await asyncio.to_thread(RECENT.newest, redactor.text, *asked)
                else:
                    found = await peers[name].client.log_lines(*asked)
            except FoveaError as error:
                failures[name] = error.message
            else:
                lines.extend({"service": name, "at": one.at, "level": one.level, "text": one.text} for one in found)

        names = [_OWN_NAME, *peers]
        await asyncio.gather(*(read(name) for name in names if service in ("", name)))
        lines.sort(key=lambda line: line["at"])
        return {"services": names, "lines": lines[-_LOG_LINES:], "failures": failures}

    def find(self, name: str) -> BaseModel | None:
        """Returns the base model with this name, or None if it is not served."""
        return self._by_name.get(name)

    def get(self, name: str) -> BaseModel:
        """Returns the base model with this name. Raises NotFound."""
        if (model := self.find(name)) is None:
            raise NotFound(f"base_model {name!r} is not served; use {_listed(self)}", field="base_model")
        return model

    def check_trained(self, name: str) -> None:
        """Raises NotFound for a base model that is not served, InvalidInput for one that is for sampling only."""
        if not self.get(name).trainers:
            trained = [model for model in self if model.trainers]
            fix = f"train {_listed(trained)}" if trained else "no base model here has a trainer"
            raise InvalidInput(f"base_model {name!r} is served for sampling only; {fix}", field="base_model")

    def check_sampled(self, name: str, field: str = "base_model") -> None:
        """Raises NotFound for a base model that is not served, and InvalidInput for one that is served for training
        only.

        Args:
            field: The request field with which the client chose the base model.
        """
        if not self.get(name).is_sampled:
            sampled = [model for model in self if model.is_sampled]
            fix = (
                f"sample {_listed(sampled)}" if sampled else "no base model here has a sampler (fovea up --samplers 1)"
            )
            raise InvalidInput(f"base_model {name!r} is served for training only; {fix}", field=field)

    async def check_adapter(self, name: str, uri: str, lora: LoraConfig) -> None:
        """Compares the header of an uploaded adapter with a base model, if the base model has a trainer.

        Raises NotFound for a base model that is not served, InvalidInput for the first tensor that does not fit, and
        Unavailable while the trainer does not answer.
        """
        if trainers := self.get(name).trainers:
            await (trainers.up or trainers.links)[0].client.check_adapter(uri, lora, _CHECK_S)

    async def start(self) -> None:
        """Starts the trainers first, because the files of the other services are compared with theirs."""
        await asyncio.gather(*(trainer.start() for trainer in self.trainers))
        await asyncio.gather(*(part.start() for model in self for part in (model.renderers, model.samplers)))

    async def close(self) -> None:
        """Stops the health checks and closes the channels."""
        for model in self:
            await model.samplers.close()
            await model.renderers.close()
        for trainer in self.trainers:
            await trainer.close()


def _listed(models: "BaseModels | list[BaseModel]") -> str:
    return " or ".join(repr(model.name) for model in models)


def whole_text(tokenizer: str, ids: Sequence[int]) -> str | None:
    """Returns the text of tokens together, as `token_texts` does of each. Blocks."""
    found = _load_tokenizer(tokenizer)
    return None if found is None else found.decode(ids, skip_special_tokens=False)


class _Tokenizer(Protocol):
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


def token_texts(tokenizer: str, ids: Sequence[int]) -> list[str] | None:
    """Returns the text of each token, from a tokenizer file on this machine; None if there is none. Blocks.

    If a character consists of several tokens, its last token has the text and the others are empty.

    Args:
        tokenizer: A directory, or the name of a hub repository in this machine's cache.
    """
    found = _load_tokenizer(tokenizer)
    return None if found is None else list(_decoded(found, ids))


def _decoded(tokenizer: _Tokenizer, ids: Sequence[int]) -> Iterator[str]:
    pending: list[int] = []
    for token in ids:
        pending.append(token)
        text = tokenizer.decode(pending, skip_special_tokens=False)
        if text.endswith("\ufffd") and len(pending) < _CHARACTER_TOKENS:
            yield ""
        else:
            yield text
            pending = []


@lru_cache(maxsize=8)
def _load_tokenizer(tokenizer: str) -> _Tokenizer | None:
    try:
        from tokenizers import Tokenizer

        path = Path(tokenizer) / _TOKENIZER_FILE
        if not path.is_file():
            path = _cached_file(tokenizer)
        loaded: Any = Tokenizer.from_file(str(path))
        found: _Tokenizer = loaded
        return found
    except Exception as error:  # The library raises plain exceptions.
        logger.info("token ids are shown without texts: found no tokenizer of %s (%s)", tokenizer, error)
        return None


def _cached_file(name: str) -> Path:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, _TOKENIZER_FILE)
    if not isinstance(found, str):
        raise FileNotFoundError(f"{_TOKENIZER_FILE} of {name} is not in the cache")
    return Path(found)
