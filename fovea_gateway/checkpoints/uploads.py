"""Uploads: adapters that were made elsewhere, sent to signed links, and checked before they become checkpoints.

All that is known of one that is not finished lies in its folder, whose name says when it ends.
"""

import asyncio
import json
import math
import re
import struct
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterable
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from google.protobuf import json_format

from fovea.api.v1 import weights_pb2
from fovea.wire.conventions import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from fovea.wire.errors import FoveaError, InvalidInput, NotFound, PayloadTooLarge, PermissionDenied
from fovea_gateway.checkpoints.checkpoint import EXTERNAL, Checkpoint, CheckpointPath
from fovea_gateway.checkpoints.checkpoint_registry import Checkpoints, get_row, named_uris, put_row
from fovea_gateway.checkpoints.exports import LinkSigner
from fovea_gateway.database.database import Database
from fovea_gateway.http.request_body import parse_loosely
from fovea_gateway.scopes import CALLER

_FOLDER = "uploads"
_NAME = "uploaded"
_ABOUT = "fovea_upload.json"
"""Beside the files of an upload that is not finished: whose it is."""
_PART = "fovea_part."
"""Prefix of a file that is being sent; no link is ever given for what begins with fovea_."""
_UPLOAD_ID = re.compile(r"upload-([0-9]{10})-[0-9a-f]{16}")
_TTL_S = 3600
_MOST_CONFIG_BYTES = 2**20
_MOST_HEADER_BYTES = 2**20
"""The size limit of a safetensors header, which takes about 100 bytes a tensor: room for ten thousand tensors."""
_MOST_ELEMENTS = 2**17
_FACTOR = re.compile(r"(.+)\.lora_([AB])\.weight")
_ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
_UNSUPPORTED = ("use_dora", "use_rslora", "fan_in_fan_out", "modules_to_save", "rank_pattern", "alpha_pattern")
"""What changes how an adapter is computed, or is more than one; unset, false or empty in what is taken."""


class UploadLink(NamedTuple):
    """What lets its holder send one file.

    Attributes:
        expires_at: Seconds since the epoch, whole.
        key_id: The API key that asked for the link, which is good no longer than the key.
        signature: HMAC-SHA256 over upload, file, expiry and key id, in hex.
    """

    upload_id: str
    file: str
    expires_at: int
    key_id: str
    signature: str


class Uploads:
    """Adapters as PEFT stores them, on their way to being external weights of this gateway.

    Args:
        most_bytes: Of one file.
    """

    def __init__(self, database: Database, checkpoints: Checkpoints, signer: LinkSigner, most_bytes: int) -> None:
        self._database, self._checkpoints, self._signer = database, checkpoints, signer
        self._most_bytes = most_bytes
        # Of uploads that are not finished: whose they are, and the bytes of their files.
        self._unfinished: dict[str, tuple[str, Counter[str]]] = {}
        self._changing: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def start(self, owner: str, base_model: str, lora: weights_pb2.LoraConfig) -> tuple[str, list[UploadLink]]:
        """An upload, and a link for each of its files. Raises ResourceExhausted if the owner has no room."""
        await self._checkpoints.check_room(owner)
        expires_at = int(time.time()) + _TTL_S
        upload_id = f"upload-{expires_at}-{uuid.uuid4().hex[:16]}"
        about = {"owner": owner, "base_model": base_model, "lora": json_format.MessageToDict(lora)}
        uri = self._uri(upload_id)
        await self._checkpoints.storage.make_folder(uri)
        await self._checkpoints.storage.write(uri, _ABOUT, json.dumps(about).encode())
        return upload_id, [self._link(upload_id, file, expires_at) for file in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)]

    async def receive(self, link: UploadLink, declared_bytes: int, pieces: AsyncIterable[bytes]) -> None:
        """Keeps a file, in the place of one that was sent before.

        Raises PermissionDenied for a link that is wrong or old, PayloadTooLarge as soon as that is known,
        ResourceExhausted if the owner has no room, DiskFull.
        """
        # Before anything is looked up: a stranger learns nothing of which uploads there are.
        parts = ("upload", link.upload_id, link.file, str(link.expires_at))
        if not self._signer.check(link.signature, link.key_id, *parts):
            raise PermissionDenied("this link is not valid; ask for external_weights_upload_start again")
        about = await self._about(link.upload_id)
        owner: str = about["owner"]
        room = await self._checkpoints.room(owner) + self._checkpoints.unfinished_bytes[owner]
        limit = _MOST_CONFIG_BYTES if link.file == ADAPTER_CONFIG else self._most_bytes
        if declared_bytes > limit:
            raise _too_large(link.file, limit)
        part = f"{_PART}{uuid.uuid4().hex[:8]}"
        storage, uri, size = self._checkpoints.storage, self._uri(link.upload_id), 0
        try:
            async with storage.receiving(uri, part) as write:
                async for piece in pieces:
                    size += len(piece)
                    self._count(link.upload_id, owner, part, len(piece))
                    if size > limit:
                        raise _too_large(link.file, limit)
                    # Whatever else the owner sends at the same time counts too.
                    if self._checkpoints.unfinished_bytes[owner] > room:
                        raise self._checkpoints.no_room(owner)
                    await write(piece)
            async with self._lock(link.upload_id):
                try:
                    await self._about(link.upload_id)  # it may have been finished or have expired meanwhile
                except PermissionDenied:
                    await storage.remove_file(uri, part)
                    raise
                await storage.rename(uri, part, link.file)
                replaced = self._unfinished[link.upload_id][1][link.file]
                self._count(link.upload_id, owner, link.file, size - replaced)
        finally:
            # If the upload was finished or removed meanwhile, the bytes of the part are forgotten with it.
            _, sizes = self._unfinished.get(link.upload_id, (owner, Counter[str]()))
            if counted := sizes[part]:
                self._count(link.upload_id, owner, part, -counted)

    async def finish(self, owner: str, upload_id: str) -> str:
        """Makes a checkpoint of what was sent, once it is sound; returns its path. May be called again.

        Raises NotFound for no upload of the caller's, InvalidInput that names the first thing that is wrong with its
        files: they may be sent again then.
        """
        async with self._lock(upload_id):
            return await self._finish(owner, upload_id)

    async def _finish(self, owner: str, upload_id: str) -> str:
        path = str(CheckpointPath(upload_id, EXTERNAL, _NAME))
        done = await self._database.read(lambda connection: get_row(connection, path))
        if done is not None and done.owner == owner:
            return path
        missing = NotFound(f"there is no upload {upload_id!r} of yours, or it has expired", field="upload_id")
        if not _UPLOAD_ID.fullmatch(upload_id):
            raise missing
        try:
            about = await self._about(upload_id)
        except PermissionDenied:
            raise missing from None
        if about["owner"] != owner:
            raise missing
        storage, uri = self._checkpoints.storage, self._uri(upload_id)
        sizes = await storage.sizes(uri)
        if unsent := [file for file in (ADAPTER_CONFIG, ADAPTER_WEIGHTS) if file not in sizes]:
            raise InvalidInput(f"{unsent[0]} was not sent yet: PUT it to its URL", field="upload_id")
        lora = json_format.ParseDict(about["lora"], weights_pb2.LoraConfig())
        lora.alpha = await storage.run(check_config, await storage.read(uri, ADAPTER_CONFIG), lora.rank)
        await self._check_weights(uri, sizes[ADAPTER_WEIGHTS], lora.rank)
        await self._checkpoints.check_room(owner)
        size_bytes = sizes[ADAPTER_CONFIG] + sizes[ADAPTER_WEIGHTS]
        checkpoint = Checkpoint(
            path, upload_id, owner, EXTERNAL, _NAME, uri, about["base_model"], lora, size_bytes=size_bytes
        )
        # Without what says whose it is nobody can send to it any more: a row that is kept names what never changes.
        await storage.remove_file(uri, _ABOUT)
        await storage.sync(uri)
        await self._database.write(lambda connection: put_row(connection, checkpoint))
        self._forget(upload_id)
        return path

    async def _check_weights(self, uri: str, size_bytes: int, rank: int) -> None:
        """Looks at the header of a safetensors file alone. Raises InvalidInput."""
        storage = self._checkpoints.storage
        head = await self._read(uri, 0, min(8, size_bytes))
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
        if not 0 < length <= size_bytes - 8:
            raise InvalidInput(f"{ADAPTER_WEIGHTS} is no safetensors file", field="upload_id")
        if length > _MOST_HEADER_BYTES:
            raise _too_large(f"the header of {ADAPTER_WEIGHTS}", _MOST_HEADER_BYTES)
        header = await self._read(uri, 8, length)
        await storage.run(check_header, header, size_bytes - 8 - length, rank)

    async def _read(self, uri: str, start: int, length: int) -> bytes:
        pieces = await self._checkpoints.storage.stream(uri, ADAPTER_WEIGHTS, start, length)
        return b"".join([piece async for piece in pieces])

    def _count(self, upload_id: str, owner: str, file: str, size_bytes: int) -> None:
        """Counts bytes of a file of an upload that is not finished, until it is forgotten."""
        _, sizes = self._unfinished.setdefault(upload_id, (owner, Counter()))
        sizes[file] += size_bytes
        self._checkpoints.unfinished_bytes[owner] += size_bytes

    def _forget(self, upload_id: str) -> None:
        """Counts an upload no longer, which is a checkpoint now, or gone."""
        owner, sizes = self._unfinished.pop(upload_id, ("", Counter[str]()))
        self._checkpoints.unfinished_bytes[owner] -= sizes.total()

    async def remove_expired(self) -> None:
        """Removes the folders of uploads that were not finished in time; counts those that an earlier gateway left."""
        storage = self._checkpoints.storage
        found = {f"{storage.root}/{_FOLDER}/{name}" for name in await storage.entries(f"{storage.root}/{_FOLDER}")}
        held = set(await self._database.read(named_uris))
        for uri in found - held:
            match = _UPLOAD_ID.fullmatch(uri.rpartition("/")[2])
            if match is None:
                continue
            # One that ends just now may be finishing: the next time.
            if int(match[1]) + _TTL_S < time.time():
                await storage.remove(uri)
                self._forget(match[0])
            elif match[0] not in self._unfinished:
                await self._count_left(match[0], uri)

    async def _count_left(self, upload_id: str, uri: str) -> None:
        with suppress(PermissionDenied):  # it ends now
            about, sizes = await self._about(upload_id), await self._checkpoints.storage.sizes(uri)
            if upload_id not in self._unfinished:
                for file in sizes.keys() & {ADAPTER_CONFIG, ADAPTER_WEIGHTS}:
                    self._count(upload_id, about["owner"], file, sizes[file])

    async def _about(self, upload_id: str) -> dict[str, Any]:
        """Whose an upload is. Raises PermissionDenied for one that has ended."""
        match = _UPLOAD_ID.fullmatch(upload_id)
        gone = PermissionDenied("this upload is finished or has expired; begin another one")
        if not match or int(match[1]) <= time.time():
            raise gone
        try:
            about: dict[str, Any] = json.loads(await self._checkpoints.storage.read(self._uri(upload_id), _ABOUT))
        except FileNotFoundError:
            raise gone from None
        return about

    def _lock(self, upload_id: str) -> asyncio.Lock:
        """Held where the files of an upload change their names, and while they are made a checkpoint."""
        return self._changing.setdefault(upload_id, asyncio.Lock())

    def _uri(self, upload_id: str) -> str:
        return f"{self._checkpoints.storage.root}/{_FOLDER}/{upload_id}"

    def _link(self, upload_id: str, file: str, expires_at: int) -> UploadLink:
        key_id = CALLER.get().key_id
        signature = self._signer.sign("upload", upload_id, file, str(expires_at), key_id)
        return UploadLink(upload_id, file, expires_at, key_id, signature)


def check_config(content: bytes, rank: int) -> float:
    """The alpha of an adapter that can be computed here as it was elsewhere.

    Raises InvalidInput that names the first field which it has otherwise.
    """
    config = _json_object(content, ADAPTER_CONFIG)
    if config.get("peft_type") != "LORA":
        raise _wrong_config("peft_type", config, "LORA is what is taken")
    if config.get("r") != rank:
        raise _wrong_config("r", config, f"lora_config.rank of the upload is {rank}")
    if config.get("bias", "none") != "none":
        raise _wrong_config("bias", config, "none is what is taken")
    for name in _UNSUPPORTED:
        if config.get(name):
            raise _wrong_config(name, config, "an adapter with it is computed otherwise than adapters here")
    alpha = config.get("lora_alpha")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not (math.isfinite(alpha) and alpha > 0):
        raise _wrong_config("lora_alpha", config, "it must be a number above 0")
    return float(alpha)


def _json_object(content: bytes, name: str) -> dict[str, Any]:
    try:
        return parse_loosely(content, _MOST_ELEMENTS, name)
    except FoveaError as error:
        error.field = "upload_id"
        raise


def _wrong_config(name: str, config: dict[str, Any], words: str) -> InvalidInput:
    return InvalidInput(f"{ADAPTER_CONFIG}: {name} is {config.get(name)!r:.80}; {words}", field="upload_id")


def check_header(header: bytes, data_bytes: int, rank: int) -> None:
    """Checks the header of a safetensors file of `data_bytes` after it: pairs of factors, of this rank.

    Raises InvalidInput that names the first tensor which is wrong (https://github.com/huggingface/safetensors, Format).
    """
    found = _json_object(header, f"the header of {ADAPTER_WEIGHTS}")
    try:
        tensors = {name: _Tensor.of(entry) for name, entry in found.items() if name != "__metadata__"}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InvalidInput(f"{ADAPTER_WEIGHTS} has a damaged header: {error}", field="upload_id") from None
    if not tensors:
        raise InvalidInput(f"{ADAPTER_WEIGHTS} has no tensors", field="upload_id")
    for name, tensor in tensors.items():
        match = _FACTOR.fullmatch(name)
        if match is None:
            raise _wrong_tensor(name, "is no factor: names end with .lora_A.weight or .lora_B.weight")
        other = f"{match[1]}.lora_{'B' if match[2] == 'A' else 'A'}.weight"
        if other not in tensors:
            raise _wrong_tensor(name, f"has no {other} beside it")
        if tensor.dtype not in _ITEM_BYTES:
            raise _wrong_tensor(name, f"has type {tensor.dtype:.20}; {', '.join(_ITEM_BYTES)} are taken")
        if len(tensor.shape) not in (2, 3) or tensor.shape[-2 if match[2] == "A" else -1] != rank:
            raise _wrong_tensor(name, f"has shape {list(tensor.shape)}, which is none of rank {rank}")
        if tensor.begin < 0 or tensor.end > data_bytes:
            raise _wrong_tensor(name, "lies outside the file: it was not sent whole")
        if tensor.end - tensor.begin != math.prod(tensor.shape) * _ITEM_BYTES[tensor.dtype]:
            raise _wrong_tensor(name, "has another size than its shape says")


class _Tensor(NamedTuple):
    """What a header says of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @classmethod
    def of(cls, entry: dict[str, Any]) -> "_Tensor":
        numbers = [*entry["shape"], *entry["data_offsets"]]
        if not all(type(number) is int for number in numbers) or not isinstance(entry["dtype"], str):
            raise ValueError("shape, data_offsets or dtype is of another type")
        begin, end = entry["data_offsets"]
        return cls(entry["dtype"], tuple(entry["shape"]), begin, end)


def _wrong_tensor(name: str, words: str) -> InvalidInput:
    return InvalidInput(f"{ADAPTER_WEIGHTS}: {name:.200} {words}", field="upload_id")


def _too_large(file: str, limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"{file} is above {limit} bytes, the limit for uploads here", field="upload_id")
