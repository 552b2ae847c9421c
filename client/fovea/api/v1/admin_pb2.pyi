from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ApiKey(_message.Message):
    __slots__ = ("key_id", "owner", "name", "scope", "source", "created_at", "expires_at", "revoked_at", "problem")
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    REVOKED_AT_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    key_id: str
    owner: str
    name: str
    scope: str
    source: str
    created_at: float
    expires_at: float
    revoked_at: float
    problem: str
    def __init__(self, key_id: _Optional[str] = ..., owner: _Optional[str] = ..., name: _Optional[str] = ..., scope: _Optional[str] = ..., source: _Optional[str] = ..., created_at: _Optional[float] = ..., expires_at: _Optional[float] = ..., revoked_at: _Optional[float] = ..., problem: _Optional[str] = ...) -> None: ...

class CreateKeyRequest(_message.Message):
    __slots__ = ("owner", "name", "scope", "expires_at")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    owner: str
    name: str
    scope: str
    expires_at: float
    def __init__(self, owner: _Optional[str] = ..., name: _Optional[str] = ..., scope: _Optional[str] = ..., expires_at: _Optional[float] = ...) -> None: ...

class CreateKeyResponse(_message.Message):
    __slots__ = ("text", "key")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    text: str
    key: ApiKey
    def __init__(self, text: _Optional[str] = ..., key: _Optional[_Union[ApiKey, _Mapping]] = ...) -> None: ...

class ListKeysRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListKeysResponse(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedCompositeFieldContainer[ApiKey]
    def __init__(self, keys: _Optional[_Iterable[_Union[ApiKey, _Mapping]]] = ...) -> None: ...

class RevokeKeyRequest(_message.Message):
    __slots__ = ("key_id",)
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    key_id: str
    def __init__(self, key_id: _Optional[str] = ...) -> None: ...

class RevokeKeyResponse(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: ApiKey
    def __init__(self, key: _Optional[_Union[ApiKey, _Mapping]] = ...) -> None: ...

class ExpireKeyRequest(_message.Message):
    __slots__ = ("key_id", "expires_at")
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    key_id: str
    expires_at: float
    def __init__(self, key_id: _Optional[str] = ..., expires_at: _Optional[float] = ...) -> None: ...

class ExpireKeyResponse(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: ApiKey
    def __init__(self, key: _Optional[_Union[ApiKey, _Mapping]] = ...) -> None: ...

class Owner(_message.Message):
    __slots__ = ("owner", "weight", "max_models", "max_stored_bytes", "max_tokens_in_flight", "max_requests_per_s")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    MAX_MODELS_FIELD_NUMBER: _ClassVar[int]
    MAX_STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUESTS_PER_S_FIELD_NUMBER: _ClassVar[int]
    owner: str
    weight: float
    max_models: int
    max_stored_bytes: int
    max_tokens_in_flight: int
    max_requests_per_s: float
    def __init__(self, owner: _Optional[str] = ..., weight: _Optional[float] = ..., max_models: _Optional[int] = ..., max_stored_bytes: _Optional[int] = ..., max_tokens_in_flight: _Optional[int] = ..., max_requests_per_s: _Optional[float] = ...) -> None: ...

class PutOwnerRequest(_message.Message):
    __slots__ = ("owner",)
    OWNER_FIELD_NUMBER: _ClassVar[int]
    owner: Owner
    def __init__(self, owner: _Optional[_Union[Owner, _Mapping]] = ...) -> None: ...

class PutOwnerResponse(_message.Message):
    __slots__ = ("owner",)
    OWNER_FIELD_NUMBER: _ClassVar[int]
    owner: Owner
    def __init__(self, owner: _Optional[_Union[Owner, _Mapping]] = ...) -> None: ...

class ListOwnersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListOwnersResponse(_message.Message):
    __slots__ = ("owners",)
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    owners: _containers.RepeatedCompositeFieldContainer[Owner]
    def __init__(self, owners: _Optional[_Iterable[_Union[Owner, _Mapping]]] = ...) -> None: ...

class GetUsageRequest(_message.Message):
    __slots__ = ("owner", "days")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    DAYS_FIELD_NUMBER: _ClassVar[int]
    owner: str
    days: int
    def __init__(self, owner: _Optional[str] = ..., days: _Optional[int] = ...) -> None: ...

class UsageOfDay(_message.Message):
    __slots__ = ("owner", "key_id", "day", "trained_tokens", "scored_tokens", "prompt_tokens", "cached_tokens", "sampled_tokens", "gpu_seconds")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    DAY_FIELD_NUMBER: _ClassVar[int]
    TRAINED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SCORED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GPU_SECONDS_FIELD_NUMBER: _ClassVar[int]
    owner: str
    key_id: str
    day: str
    trained_tokens: int
    scored_tokens: int
    prompt_tokens: int
    cached_tokens: int
    sampled_tokens: int
    gpu_seconds: float
    def __init__(self, owner: _Optional[str] = ..., key_id: _Optional[str] = ..., day: _Optional[str] = ..., trained_tokens: _Optional[int] = ..., scored_tokens: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., sampled_tokens: _Optional[int] = ..., gpu_seconds: _Optional[float] = ...) -> None: ...

class GetUsageResponse(_message.Message):
    __slots__ = ("usage", "stored_bytes")
    class StoredBytesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    USAGE_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    usage: _containers.RepeatedCompositeFieldContainer[UsageOfDay]
    stored_bytes: _containers.ScalarMap[str, int]
    def __init__(self, usage: _Optional[_Iterable[_Union[UsageOfDay, _Mapping]]] = ..., stored_bytes: _Optional[_Mapping[str, int]] = ...) -> None: ...

class ListParkedSessionsRequest(_message.Message):
    __slots__ = ("owner",)
    OWNER_FIELD_NUMBER: _ClassVar[int]
    owner: str
    def __init__(self, owner: _Optional[str] = ...) -> None: ...

class ParkedSession(_message.Message):
    __slots__ = ("session_id", "owner", "parked_at", "size_bytes", "model_ids")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    PARKED_AT_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MODEL_IDS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    owner: str
    parked_at: float
    size_bytes: int
    model_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, session_id: _Optional[str] = ..., owner: _Optional[str] = ..., parked_at: _Optional[float] = ..., size_bytes: _Optional[int] = ..., model_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ListParkedSessionsResponse(_message.Message):
    __slots__ = ("sessions",)
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[ParkedSession]
    def __init__(self, sessions: _Optional[_Iterable[_Union[ParkedSession, _Mapping]]] = ...) -> None: ...
