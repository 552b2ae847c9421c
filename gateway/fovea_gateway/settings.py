"""Settings of the gateway. The command line overrides `FOVEA_GATEWAY_*`, which override the defaults."""

import json
from pathlib import Path
from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

import fsspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, WithJsonSchema, field_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from fovea.runtime.durable import room_bytes
from fovea.runtime.hosts import is_loopback
from fovea.runtime.settings import ServiceSettings
from fovea.wire.errors import FoveaError
from fovea_gateway.access.api_keys import PUBLISHED, GivenKey, parse_given
from fovea_gateway.access.oidc import OidcSettings
from fovea_gateway.access.owners import LIMITS, Owner

_LIMITS_BEYOND_LOOPBACK = {"max_requests_per_s": 500.0, "max_tokens_in_flight": 16e6, "max_stored_bytes": 500e9}


def _addresses(value: object) -> object:
    """Returns a list of addresses. A text is a JSON list, or addresses with commas between them."""
    if isinstance(value, str):
        value = json.loads(value) if value.startswith(('["', "[]")) else value.split(",")
    if not isinstance(value, list):
        return value
    return [address for text in value for address in str(text).split(",") if address]


Addresses = Annotated[list[str], NoDecode, BeforeValidator(_addresses)]


class BaseModelSettings(BaseModel):
    """One base model: its name, and the addresses of its services."""

    model_config = ConfigDict(extra="forbid")

    model_name: str = Field(description="Name that clients use as `base_model`.")
    model: str = Field(description="Directory or hub name of the model, the same as in the settings of its services.")
    tokenizer: str = Field("", description="Tokenizer that clients load; the model's by default.")
    renderer: list[str] = Field(description="Like --renderer, with the same --discovery.")
    sampler: list[str] = Field(description="Like --sampler; if empty, the model is served for training only.")
    trainer: Annotated[Addresses, WithJsonSchema({"type": ["string", "array"], "items": {"type": "string"}})] = Field(
        [], description="Like --trainer; if empty, the model is served for sampling only."
    )

    @property
    def tokenizer_id(self) -> str:
        """Returns the tokenizer that `get_info` reports."""
        return self.tokenizer or self.model


class GatewaySettings(OidcSettings, ServiceSettings):
    """Fovea's gateway: Tinker's REST API and a gRPC API, in front of renderer, samplers and trainer."""

    model_config = SettingsConfigDict(env_prefix="FOVEA_GATEWAY_", cli_prog_name="python -m fovea_gateway")
    internal: ClassVar[bool] = False  # clients bring keys

    model_name: str = Field(description="Name that clients use as `base_model`.")
    model: str = Field(description="Directory or hub name of the model, the same as in the settings of its services.")
    tokenizer: str = Field("", description="Tokenizer that clients load; the model's by default.")
    discovery: Literal["static", "kubernetes"] = Field(
        "static",
        description="Method to find renderers and samplers. static: at fixed addresses. kubernetes: in the"
        " EndpointSlices of a service, through the Kubernetes API.",
    )
    renderer: list[str] = Field(
        description="static: host:port of a renderer, repeated for several. kubernetes: one service:port;"
        " the port is a number or its name in the service."
    )
    sampler: list[str] = Field(
        description="The samplers, in the format of --renderer; if empty ([]), the model is served for training only."
    )
    trainer: Addresses = Field(
        description="host:port of a trainer, with any --discovery, repeated for several; if empty, the model is served"
        " for sampling only. Several trainers share the models, and must share one --recovery storage."
    )
    further_models: list[BaseModelSettings] = Field(
        [],
        description="More base models behind this gateway, such as the teacher of a student. Each is a JSON object with"
        " model_name, model, renderer, sampler and, unless it is for sampling only, trainer.",
    )
    kubernetes_namespace: str = Field("", description="Namespace of the services; by default the pod's own.")
    port: int = Field(8000, ge=0, le=65535, description="REST port; 0 selects a free one.")
    grpc_port: int = Field(0, ge=0, le=65535, description="gRPC port; 0 selects a free one.")
    base_path: str = Field("", description="Prefix of all REST paths, such as /fovea.")
    state_dir: Path = Field(Path("fovea-state"), description="Folder of the database and, by default, of checkpoints.")
    database_url: str = Field("", description="SQLAlchemy URL; SQLite in the state folder by default.")
    shards: int = Field(
        1,
        ge=1,
        le=256,
        description="Number of shards of the sessions in PostgreSQL, the same for all gateways. Each gateway owns one,"
        " and routers lead requests to it. It may grow later, but never shrink.",
    )
    shard_host: str = Field("", description="Host at which routers reach this gateway; by default its own address.")
    checkpoint_dir: str = Field("", description="Folder or fsspec URL of checkpoints, for trainer and gateway.")
    api_key: list[str] = Field(
        [],
        description="Keys that clients may use, each tml-KEY or OWNER=tml-KEY; all keys of an owner see the same data."
        " Every user of the machine can read arguments in `ps`, so prefer the environment or api_key_file. Without any"
        " key, the key tml-local is accepted from this machine.",
    )
    api_key_file: Path | None = Field(None, description="A file with more such keys, one per line.")
    allowed_host: list[str] = Field(
        [],
        description="Host names besides loopback ones, such as gpu7.lan, under which clients may use the published key"
        " tml-local. Other keys work under any name.",
    )

    max_body_bytes: int = Field(
        128 * 2**20,
        gt=0,
        description="The largest body of samples and losses, in bytes, before and after zstd decompression.",
    )
    max_upload_bytes: int = Field(4 * 2**30, gt=0, description="The largest file of an uploaded adapter, in bytes.")
    max_request_memory_bytes: int = Field(
        2**30,
        gt=0,
        description="Memory in bytes for the bodies of all requests in progress. One owner may use as much as is free,"
        " so half if it is the only one; above that, the gateway asks its clients to send their requests again later.",
    )
    request_timeout_s: float = Field(
        30.0,
        gt=0,
        description="Seconds in which the head of a request must arrive and its body must begin. The body must then"
        " arrive at 16 KiB/s or more.",
    )
    max_connections: int = Field(
        16_384,
        gt=0,
        description="Limit of concurrent REST connections, at most half of the files that the process may open. Above"
        " it, a new connection replaces one of the address with the most. Also the limit of concurrent gRPC"
        " connections, at most a quarter of those files; one address may have as many as are free, so half if it is"
        " the only one.",
    )
    poll_hold_s: float = Field(
        30.0, gt=0, le=35, description="Seconds that a poll of an unfinished future is held, plus or minus a fifth."
    )
    result_ttl_s: float = Field(24 * 3600.0, gt=0, description="Seconds for which a result can be fetched again.")
    max_result_bytes: int = Field(
        16 * 2**30,
        gt=0,
        description="Bytes of results in the database. One owner may have as much as is free, so half if it is the only"
        " one; above that, its oldest results expire early.",
    )
    ended_ttl_s: float = Field(
        30 * 86400.0,
        gt=0,
        description="Seconds after which an ended session is deleted with its models, unless one of them has a"
        " checkpoint. A model that could not be created is deleted after the same time.",
    )
    max_row_bytes: int = Field(
        2**30,
        gt=0,
        description="Bytes of the database's rows of sessions, models, sampling sessions and checkpoints, including"
        " texts; at most a quarter of the disk of state_dir. One owner may have as much as is free. Above that, its"
        " ended sessions are deleted early; if that is not enough, the gateway accepts no new rows of it. Recorded"
        " samples may have half as much again; an owner's least recently used ones make room for new ones.",
    )
    session_ttl_s: float = Field(
        600.0,
        gt=0,
        description="Seconds without heartbeat after which a session is parked until its client returns, or ends if the"
        " trainer stores no recovery data. Clients warn at 120.",
    )
    quiet_s: float = Field(
        30.0,
        gt=0,
        description="Seconds without a heartbeat or poll after which queued requests of a session give way to requests"
        " of other clients. The SDK sends a heartbeat every ten seconds.",
    )
    parked_ttl_s: float = Field(7 * 86400.0, gt=0, description="Seconds after which a parked session ends.")
    parked_bytes: int = Field(
        64 * 2**30,
        gt=0,
        description="Bytes of the trainer's storage for parked sessions; `fovea up` gives them at most a quarter of its"
        " free disk. Above it, the oldest ones end, of the owner with the most bytes relative to its weight.",
    )
    unnamed_bytes: int = Field(
        64 * 2**30,
        gt=0,
        description="Bytes of the trainer's storage for unnamed adapter snapshots; `fovea up` gives them at most a"
        " quarter of its free disk. Above it, owners with more than their share lose those unused for the longest time,"
        " and for a minute or more. The newest of each model stays.",
    )
    inline_limit_bytes: int = Field(2**20, gt=0, description="Larger results are announced with their size first.")
    compress_from_bytes: int = Field(
        256 * 2**10,
        gt=0,
        description="Results of at least this size are compressed for clients that accept zstd or gzip.",
    )
    gap_timeout_s: float = Field(600.0, gt=0, description="Seconds that later commands wait for a missing seq_id.")
    command_timeout_s: float = Field(
        3600.0,
        gt=0,
        description="Deadline in seconds of a trainer command that changes no model; other commands have no deadline.",
    )
    push_timeout_s: float = Field(120.0, gt=0, description="Deadline in seconds of a push of weights to samplers.")
    sample_timeout_s: float = Field(3600.0, gt=0, description="Deadline in seconds of a sample request in a sampler.")
    retry_deadline_s: float = Field(
        1800.0,
        ge=0,
        description="Seconds for which samples wait for a sampler to return, images for a renderer, and new models for"
        " a trainer. It should be longer than it takes to load a large model.",
    )
    trainer_wait_s: float = Field(5.0, ge=0, description="Seconds that a command waits for an unreachable trainer.")
    disk_wait_s: float = Field(
        3600.0, ge=0, description="Seconds for which a save command waits for room on a full disk before it fails."
    )
    sampler_concurrency: int = Field(
        1024,
        gt=0,
        description="Concurrent sequences in one sampler, at most a quarter more than its batch; further ones queue in"
        " the gateway.",
    )
    sampler_beside: int = Field(
        0,
        ge=0,
        description="Concurrent sequences in one sampler while an owner without queued requests is active, or was in"
        " the last 30 s. A lower number makes its samples faster, at the cost of throughput for the others. 0 means a"
        " quarter of the batch.",
    )
    trainer_concurrency: int = Field(
        2,
        gt=0,
        description="Concurrent commands at the trainer while all are one owner's: one runs, and the next is there"
        " when it ends. While several owners use the trainer, or did recently, they take turns, and small calls share"
        " passes.",
    )
    renderer_concurrency: int = Field(32, gt=0, description="Concurrent calls in one renderer; further ones queue.")
    max_pending: int = Field(
        20_000,
        gt=0,
        description="Unfinished requests of all owners. One owner may have as many as are free, so half if it is the"
        " only one; above that, the gateway asks its clients to send further requests again later.",
    )
    max_models_per_owner: int = Field(
        0, ge=0, description="Models that one owner may have in the trainer at once; 0 means only the trainer's limit."
    )
    default_limits: dict[str, float] | None = Field(
        None,
        description='Limits of owners with none in their record, as JSON such as {"max_requests_per_s": 50}; {} means'
        " no limits. By default there are none if the gateway listens on loopback only; otherwise 500 requests per"
        " second, 16 million tokens in flight and 500 GB of checkpoints.",
        json_schema_extra={"propertyNames": {"enum": [*LIMITS]}},
    )
    gpu_hour_price_usd: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="US dollars of a GPU-hour. With it, usage shows costs too."
    )
    max_journal_bytes: int = Field(
        2 * 2**30,
        gt=0,
        description="Bytes of requests that the database stores until their effects are durable in the trainer. One"
        " owner may have as much as is free. Above that, its losses wait for durable points, or fail if none is due. If"
        " storage fails for 5 minutes, its model with the most bytes cannot be restored before its next point.",
    )
    max_sessions: int = Field(10_000, gt=0, description="Open sessions of all owners, shared like max_pending.")
    alerts_webhook: str = Field(
        "",
        description="URL to which the beginning and end of each alert are posted as JSON; treat it as a secret.",
        json_schema_extra={"pattern": "^(https?://.+)?$"},
    )
    alerts_kl: float = Field(0.5, ge=0, description="KL in nats per token above which an alert begins; 0 for none.")
    alerts_gone_s: float = Field(
        30.0, ge=0, description="Seconds without a service's answer until an alert; 0 for none."
    )
    alerts_disk_share: float = Field(
        0.95, ge=0, le=1, description="Used share of a local volume above which an alert begins; 0 for none."
    )
    alerts_durable_lag_s: float = Field(
        300.0, ge=0, description="Age in seconds of a change without a durable point until an alert; 0 for none."
    )
    alerts_slot_wait_s: float = Field(
        120.0, ge=0, description="Seconds of requests waiting for an adapter's slot until an alert; 0 for none."
    )
    default_lora_alpha: float = Field(32.0, gt=0, description="LoRA alpha of models created over REST.")
    train_vision: bool = Field(False, description="Whether LoRA models created over REST also adapt the vision tower.")
    sdk_flags: dict[str, bool | int | str] = Field({}, description="Overrides of the flags of client/config, as JSON.")

    @field_validator("further_models")
    @classmethod
    def _has_own_names(cls, value: list[BaseModelSettings], info: ValidationInfo) -> list[BaseModelSettings]:
        names = [info.data.get("model_name"), *(model.model_name for model in value)]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"two base models have the name {twice.pop()!r}: give each its own model_name")
        return value

    @field_validator("trainer")
    @classmethod
    def _has_a_use(cls, value: list[str], info: ValidationInfo) -> list[str]:
        if not value and info.data.get("sampler") == []:
            raise ValueError("the model has neither --trainer nor --sampler; set at least one of them")
        if twice := next((address for address in value if value.count(address) > 1), ""):
            raise ValueError(f"{twice!r} is given twice; give each trainer once")
        return value

    @field_validator("alerts_webhook")
    @classmethod
    def _is_web_address(cls, value: str) -> str:
        parts = urlsplit(value)
        if value and not (parts.scheme in ("http", "https") and parts.hostname):
            raise ValueError("it must be a URL such as https://hooks.example.org/fovea, or empty")
        return value

    @field_validator("default_limits")
    @classmethod
    def _has_known_limits(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        if unknown := sorted(set(value or ()) - set(LIMITS)):
            raise ValueError(f"there is no limit {unknown[0]!r}; the limits are {', '.join(LIMITS)}")
        try:
            Owner("any", **(value or {})).checked()  # type: ignore[arg-type]  # floats instead of whole numbers
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
                    f"{PUBLISHED} is a published key, and other machines can reach --host {host}: create another"
                )
        return value

    @property
    def given_keys(self) -> list[GivenKey]:
        """Returns the keys in the settings and in their file."""
        return [*_read_keys(self.api_key), *_read_keys(self.api_key_file)]

    @property
    def private_folders(self) -> list[Path]:
        """Returns the local folders that contain owners' data. New ones are accessible only to the gateway's user."""
        is_local = "://" not in self.checkpoint_root
        return [self.state_dir, *([Path(self.checkpoint_root)] if is_local else [])]

    @property
    def base_models(self) -> list[BaseModelSettings]:
        """Returns all served base models, the default one first."""
        own = {name: getattr(self, name) for name in BaseModelSettings.model_fields}
        return [BaseModelSettings(**own), *self.further_models]

    @property
    def owner_limits(self) -> dict[str, float]:
        """Returns the limits of owners that have none in their record."""
        if self.default_limits is None:
            return {} if is_loopback(self.host) else _LIMITS_BEYOND_LOOPBACK
        return self.default_limits

    def part_of(self, limit: int) -> int:
        """Returns a gateway's part of a limit that holds for the sessions of all shards together."""
        return max(limit // self.shards, 1)

    @property
    def row_room_bytes(self) -> int:
        """Returns `max_row_bytes`; for a database in the state folder, at most a quarter of the room there."""
        if self.database_url:
            return self.part_of(self.max_row_bytes)
        return min(self.max_row_bytes, room_bytes(self.state_dir) // 4)

    @property
    def store_url(self) -> str:
        """Returns the SQLAlchemy URL of the database."""
        return self.database_url or f"sqlite:///{(self.state_dir / 'gateway.db').absolute()}"

    @property
    def checkpoint_root(self) -> str:
        """Returns the folder or URL of checkpoints."""
        return self.checkpoint_dir.rstrip("/") or str((self.state_dir / "checkpoints").absolute())


def _read_keys(given: list[str] | Path | None) -> list[GivenKey]:
    """Parses keys. Raises ValueError for an invalid key or a file that cannot be read."""
    try:
        texts = given.read_text().split() if isinstance(given, Path) else given or []
    except OSError as error:
        raise ValueError(f"{given} cannot be read: {error.strerror}") from None
    return [parse_given(text) for text in texts]
