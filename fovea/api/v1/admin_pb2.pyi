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
