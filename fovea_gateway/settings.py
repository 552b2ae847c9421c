"""Settings of the gateway: command line over `FOVEA_GATEWAY_*` over defaults."""

import shutil
from pathlib import Path
from typing import ClassVar

import fsspec
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_settings import SettingsConfigDict

from fovea.runtime.hosts import is_loopback
from fovea.runtime.settings import ServiceSettings
from fovea.wire.errors import FoveaError
from fovea_gateway.access.api_keys import PUBLISHED, GivenKey, parse_given
from fovea_gateway.access.owners import LIMITS, Owner
from fovea_gateway.discovery import Kind

_LIMITS_BEYOND_LOOPBACK = {"max_requests_per_s": 500.0, "max_tokens_in_flight": 16e6, "max_stored_bytes": 500e9}


class BaseModelSettings(BaseModel):
    """One base model: what it is called, and where its services are."""

    model_config = ConfigDict(extra="forbid")

    model_name: str = Field(description="Name that clients use as `base_model`.")
    model: str = Field(description="Directory or hub name of the model, as the services were given it.")
    tokenizer: str = Field("", description="Tokenizer that clients are told to load; the model's by default.")
    renderer: list[str] = Field(description="As --renderer, by the same --discovery.")
    sampler: list[str] = Field(description="As --sampler; empty serves it for training only.")
    trainer: str = Field("", description="As --trainer; empty serves it for sampling only.")

    @property
    def tokenizer_id(self) -> str:
        """What `get_info` names as tokenizer."""
        return self.tokenizer or self.model


class GatewaySettings(ServiceSettings):
    """Fovea's gateway: Tinker's REST API and a gRPC API, in front of renderer, samplers and trainer."""

    model_config = SettingsConfigDict(env_prefix="FOVEA_GATEWAY_", cli_prog_name="python -m fovea_gateway")
    internal: ClassVar[bool] = False  # clients bring keys

    model_name: str = Field(description="Name that clients use as `base_model`.")
    model: str = Field(description="Directory or hub name of the model, as the services were given it.")
    tokenizer: str = Field("", description="Tokenizer that clients are told to load; the model's by default.")
    discovery: Kind = Field(
        "static",
        description="How renderers and samplers are found: at the addresses given; under a DNS name that resolves to"
        " all of them; or as the EndpointSlices of a service, through the Kubernetes API.",
    )
    renderer: list[str] = Field(
        description="static: host:port of a renderer, repeated for several. dns: one name:port. kubernetes: one"
        " service:port, the port a number or its name in the service."
    )
    sampler: list[str] = Field(
        description="The samplers, as the renderers; empty ([]) serves the model for training only."
    )
    trainer: str = Field(
        description="host:port of the trainer, whatever --discovery says; empty serves the model for sampling only."
    )
    further_models: list[BaseModelSettings] = Field(
        [],
        description="Further base models behind this gateway, such as the teacher of a student: each a JSON object with"
        " model_name, model, renderer, sampler and, unless it is for sampling only, trainer.",
    )
    kubernetes_namespace: str = Field("", description="Namespace of the services; by default the pod's own.")
    port: int = Field(8000, ge=0, le=65535, description="REST port; 0 takes a free one.")
    grpc_port: int = Field(0, ge=0, le=65535, description="gRPC port; 0 takes a free one.")
    base_path: str = Field("", description="Path in front of all REST paths, such as /fovea.")
    state_dir: Path = Field(Path("fovea-state"), description="Folder of the database and, by default, of checkpoints.")
    database_url: str = Field("", description="SQLAlchemy URL; SQLite in the state folder by default.")
    checkpoint_dir: str = Field("", description="Folder or fsspec URL of checkpoints, for trainer and gateway.")
    api_key: list[str] = Field(
        [],
        description="Keys that clients may use, each tml-KEY, or OWNER=tml-KEY: an owner's keys see the same. Everybody"
        " can read arguments in `ps`: use the environment or api_key_file. Without any, tml-local is good on loopback.",
    )
    api_key_file: Path | None = Field(None, description="A file of further such keys, one per line.")
    allowed_host: list[str] = Field(
        [],
        description="Names beside loopback ones, such as gpu7.lan, under which clients may use the published key"
        " tml-local. Other keys work under any name.",
    )

    max_body_bytes: int = Field(
        128 * 2**20, gt=0, description="The largest body of samples and losses, before and after zstd."
    )
    max_upload_bytes: int = Field(4 * 2**30, gt=0, description="The largest adapter that may be uploaded, in bytes.")
    max_request_memory_bytes: int = Field(
        2**30,
        gt=0,
        description="Memory for the bodies of all requests in progress. One owner may have as much as is free, so half"
        " if it is alone; above that its further requests are told to wait.",
    )
    request_timeout_s: float = Field(
        30.0,
        gt=0,
        description="Seconds in which the head of a request must come, and its body begin; the body then at 16 KiB/s.",
    )
    max_connections: int = Field(
        16_384,
        gt=0,
        description="REST connections at once, and at most half of the files that the process may open: above that, a"
        " new one takes the place of one of the address that has most. Also gRPC connections at once, at most a"
        " quarter of those files: one address may have as many as are free, so half if it is alone.",
    )
    poll_hold_s: float = Field(
        30.0, gt=0, le=35, description="Seconds that a poll of an unfinished future is held, give or take a fifth."
    )
    result_ttl_s: float = Field(24 * 3600.0, gt=0, description="Seconds that a result can be fetched again.")
    max_result_bytes: int = Field(
        16 * 2**30,
        gt=0,
        description="Results that the database keeps. One owner may have as much as is free, so half if it is alone;"
        " above that its oldest ones expire early.",
    )
    ended_ttl_s: float = Field(
        30 * 86400.0,
        gt=0,
        description="Seconds after which a session that is over is forgotten with its models, unless one of them has a"
        " checkpoint, and so is a model that could not be created.",
    )
    max_row_bytes: int = Field(
        2**30,
        gt=0,
        description="What the database keeps of sessions, models, sampling sessions and checkpoints, texts included; at"
        " most a quarter of the disk of state_dir. One owner may have as much as is free: above that, what is over is"
        " forgotten before its time, then nothing new is accepted.",
    )
    session_ttl_s: float = Field(
        600.0,
        gt=0,
        description="Seconds without heartbeat after which a session is parked, until its client comes back, or ends if"
        " the trainer keeps no recovery; clients warn at 120.",
    )
    quiet_s: float = Field(
        30.0,
        gt=0,
        description="Seconds without a heartbeat or a poll after which what a session has queued gives way to what"
        " other clients wait for; the SDK sends a heartbeat in ten seconds.",
    )
    parked_ttl_s: float = Field(7 * 86400.0, gt=0, description="Seconds after which a parked session ends.")
    parked_bytes: int = Field(
        64 * 2**30,
        gt=0,
        description="What parked sessions may take of the trainer's storage. Above it, the oldest end of the owner that"
        " has most by its weight.",
    )
    inline_limit_bytes: int = Field(
        2**20, gt=0, description="Results above this are announced by size before a client is sent them."
    )
    compress_from_bytes: int = Field(
        256 * 2**10, gt=0, description="Results from this size on are compressed for clients that read zstd or gzip."
    )
    gap_timeout_s: float = Field(600.0, gt=0, description="Seconds that later commands wait for a missing seq_id.")
    command_timeout_s: float = Field(
        3600.0, gt=0, description="Deadline of one trainer command that changes no model; one that does is waited for."
    )
    push_timeout_s: float = Field(120.0, gt=0, description="Deadline of one push of weights to samplers.")
    sample_timeout_s: float = Field(3600.0, gt=0, description="Deadline of one sample request in a sampler.")
    retry_deadline_s: float = Field(
        1800.0,
        ge=0,
        description="How long samples wait for a sampler, images for a renderer, and new models for a trainer, to come"
        " back: longer than it takes to load a large model.",
    )
    trainer_wait_s: float = Field(5.0, ge=0, description="How long a command waits for an unreachable trainer.")
    disk_wait_s: float = Field(
        3600.0, ge=0, description="How long a command that saves waits for room on a full disk, then it fails."
    )
    sampler_concurrency: int = Field(
        1024,
        gt=0,
        description="Sequences in one sampler at once, if that is less than its batch and a quarter more; the rest"
        " queue here.",
    )
    sampler_beside: int = Field(
        0,
        ge=0,
        description="Sequences in one sampler at once while an owner is there, or was in the last 30 s, of whom nothing"
        " queues: fewer make its samples faster, and take throughput from the others. 0 is a quarter of the batch.",
    )
    trainer_concurrency: int = Field(
        2,
        gt=0,
        description="Commands at the trainer at once while all are one owner's: one runs, the next is there"
        " when it ends. While several owners want the trainer, or did lately, they have it by turns, one at a time.",
    )
    renderer_concurrency: int = Field(
        32, gt=0, description="Render calls in one renderer at once; the rest queue here."
    )
    max_pending: int = Field(
        20_000,
        gt=0,
        description="Unfinished requests of all owners. One owner may have as many as are free, so half if it is alone;"
        " above that its further ones are told to wait.",
    )
    max_models_per_owner: int = Field(
        0, ge=0, description="Models that one owner may have in the trainer at once; 0 is no limit but the trainer's."
    )
    default_limits: dict[str, float] | None = Field(
        None,
        description='Limits of owners whose record names none, as JSON such as {"max_requests_per_s": 50}; {} is none.'
        " Unless set, none where only loopback reaches the gateway, and beyond it 500 requests a second, 16 million"
        " tokens in flight and 500 GB stored.",
    )
    max_journal_bytes: int = Field(
        2 * 2**30,
        gt=0,
        description="Requests that the database keeps until what they did is durable in the trainer. One owner may have"
        " as much as is free; above that, a model of it could not be restored before its next durable point.",
    )
    max_sessions: int = Field(10_000, gt=0, description="Open sessions of all owners, shared as max_pending is.")
    default_lora_alpha: float = Field(32.0, gt=0, description="LoRA alpha of models created over REST.")
    train_vision: bool = Field(False, description="Whether REST-created LoRA models also adapt the vision tower.")
    sdk_flags: dict[str, bool | int | str] = Field({}, description="Overrides of client/config's flags, as JSON.")

    @field_validator("further_models")
    @classmethod
    def _has_own_names(cls, value: list[BaseModelSettings], info: ValidationInfo) -> list[BaseModelSettings]:
        names = [info.data.get("model_name"), *(model.model_name for model in value)]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"two base models are called {twice.pop()!r}: give each a model_name of its own")
        return value

    @field_validator("trainer")
    @classmethod
    def _has_a_use(cls, value: str, info: ValidationInfo) -> str:
        if not value and info.data.get("sampler") == []:
            raise ValueError("the model has neither --trainer nor --sampler; name one of them")
        return value

    @field_validator("default_limits")
    @classmethod
    def _has_known_limits(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        if unknown := sorted(set(value or ()) - set(LIMITS)):
            raise ValueError(f"there is no limit {unknown[0]!r}; there are {', '.join(LIMITS)}")
        try:
            Owner("any", **(value or {})).checked()  # type: ignore[arg-type]  # floats in the place of whole numbers
        except FoveaError as error:
            raise ValueError(error.message) from None
        return value

    @field_validator("checkpoint_dir")
    @classmethod
    def _has_driver(cls, value: str) -> str:
        protocol, _ = fsspec.core.split_protocol(value)
        try:
            fsspec.get_filesystem_class(protocol or "file")
        except (ValueError, ImportError) as error:
            raise ValueError(f"{value!r} cannot be opened: {error}") from None
        return value

    @field_validator("api_key", "api_key_file")
    @classmethod
    def _has_keys(cls, value: list[str] | Path | None, info: ValidationInfo) -> list[str] | Path | None:
        host = info.data.get("host", "")
        for given in _read_keys(value):
            if given.key == PUBLISHED and not is_loopback(host):
                raise ValueError(
                    f"{PUBLISHED} is in the documentation, and other machines reach --host {host}: make one"
                )
        return value

    @property
    def given_keys(self) -> list[GivenKey]:
        """The keys of the settings and of their file."""
        return [*_read_keys(self.api_key), *_read_keys(self.api_key_file)]

    @property
    def private_folders(self) -> list[Path]:
        """Returns the local folders with what belongs to owners; a new one is for its user alone."""
        is_local = "://" not in self.checkpoint_root
        return [self.state_dir, *([Path(self.checkpoint_root)] if is_local else [])]

    @property
    def base_models(self) -> list[BaseModelSettings]:
        """All that are served, the default one first."""
        own = {name: getattr(self, name) for name in BaseModelSettings.model_fields}
        return [BaseModelSettings(**own), *self.further_models]

    @property
    def owner_limits(self) -> dict[str, float]:
        """The limits of owners whose record names none."""
        if self.default_limits is None:
            return {} if is_loopback(self.host) else _LIMITS_BEYOND_LOOPBACK
        return self.default_limits

    @property
    def row_room_bytes(self) -> int:
        """`max_row_bytes`, or less on a small disk."""
        if self.database_url:
            return self.max_row_bytes
        folder = self.state_dir.absolute()
        place = next(each for each in (folder, *folder.parents) if each.exists())
        return min(self.max_row_bytes, shutil.disk_usage(place).total // 4)

    @property
    def store_url(self) -> str:
        """SQLAlchemy URL of the database."""
        return self.database_url or f"sqlite:///{(self.state_dir / 'gateway.db').absolute()}"

    @property
    def checkpoint_root(self) -> str:
        """Where checkpoints are written."""
        return self.checkpoint_dir.rstrip("/") or str((self.state_dir / "checkpoints").absolute())


def _read_keys(given: list[str] | Path | None) -> list[GivenKey]:
    """Raises ValueError for what is no key, or a file that cannot be read."""
    try:
        texts = given.read_text().split() if isinstance(given, Path) else given or []
    except OSError as error:
        raise ValueError(f"{given} cannot be read: {error.strerror}") from None
    return [parse_given(text) for text in texts]
