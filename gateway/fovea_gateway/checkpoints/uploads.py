"""Uploads of adapters that were made elsewhere. Clients send files to signed links; valid adapters become checkpoints.

The state of an unfinished upload is stored in its folder. The folder's name contains the time at which it expires.
"""

import asyncio
import json
import math
import re
import struct
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterable, Awaitable, Callable
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from google.protobuf import json_format

from fovea.api.v1 import weights_pb2
from fovea.wire.conventions import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from fovea.wire.errors import FoveaError, InvalidInput, NotFound, PayloadTooLarge, PermissionDenied
from fovea_gateway.access.api_keys import CALLER, Caller
from fovea_gateway.access.sign_ins import LinkSigner, Signature
from fovea_gateway.checkpoints.checkpoint import EXTERNAL, Checkpoint, CheckpointPath
from fovea_gateway.checkpoints.checkpoint_registry import Checkpoints, get_row, named_uris, put_row
from fovea_gateway.database.database import Database
from fovea_gateway.http.request_body import parse_loosely

_FOLDER, _SIGNED_AS = "uploads", "upload"
_NAME = "uploaded"
_ABOUT = "fovea_upload.json"
"""File beside those of an unfinished upload; it records the upload's owner, base model and LoRA configuration."""
_PART = "fovea_part."
"""Prefix of a file that is being sent. No link is ever issued for a name that begins with fovea_."""
_UPLOAD_ID = re.compile(r"upload-([0-9]{10})-[0-9a-f]{16}")
_TTL_S = 3600
_MOST_CONFIG_BYTES = 2**20
_MOST_HEADER_BYTES = 2**20
"""The size limit of a safetensors header. A tensor needs about 100 bytes of it, so ten thousand tensors fit."""
_MOST_ELEMENTS = 2**17
_FACTOR = re.compile(r"(.+)\.lora_([AB])\.weight")
_ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
_UNSUPPORTED = ("use_dora", "use_rslora", "fan_in_fan_out", "modules_to_save", "rank_pattern", "alpha_pattern")
"""Options that change how an adapter is computed, or that add more than one rank or alpha. They must be unset, false or
empty.
"""


class UploadLink(NamedTuple):
    """A link that permits its holder to send one file."""

    upload_id: str
    file: str
    signature: Signature


class Uploads:
    """Adapters in PEFT's format that clients upload, to become external weights of this gateway.

    Args:
        most_bytes: The size limit of one file.
        check_adapter: Compares the header of the adapter in a folder with a base model, before any tensor is read.
            Raises InvalidInput for the first tensor that does not fit.
    """

    def __init__(
        self,
        database: Database,
        checkpoints: Checkpoints,
        signer: LinkSigner,
        most_bytes: int,
        check_adapter: Callable[[str, str, weights_pb2.LoraConfig], Awaitable[None]],
    ) -> None:
        self._database, self._checkpoints, self._signer = database, checkpoints, signer
        self._most_bytes, self._check_adapter = most_bytes, check_adapter
        # The owner and the bytes of each file of unfinished uploads, by upload id.
        self._unfinished: dict[str, tuple[str, Counter[str]]] = {}
        self._changing: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def start(self, owner: str, base_model: str, lora: weights_pb2.LoraConfig) -> tuple[str, list[UploadLink]]:
        """Starts an upload; returns its id and a link for each of its files.

        Raises ResourceExhausted if the owner has no room.
        """
        await self._checkpoints.check_room(owner)
        expires_at = int(time.time()) + _TTL_S
        upload_id = f"upload-{expires_at}-{uuid.uuid4().hex[:16]}"
        about = {"owner": owner, "base_model": base_model, "lora": json_format.MessageToDict(lora)}
        uri = self._uri(upload_id)
        await self._checkpoints.storage.make_folder(uri)
        await self._checkpoints.storage.write(uri, _ABOUT, json.dumps(about).encode())
        return upload_id, [self._link(upload_id, file, expires_at) for file in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)]

    async def receive(self, link: UploadLink, declared_bytes: int, pieces: AsyncIterable[bytes]) -> None:
        """Stores a file, replacing one that was sent before.

        Raises PermissionDenied for a link that is wrong or expired, PayloadTooLarge as soon as the size is known,
        ResourceExhausted if the owner has no room, DiskFull.
        """
        # Check before looking anything up, so that strangers cannot learn which uploads exist.
        self._signer.check(link.signature, "external_weights_upload_start", _SIGNED_AS, link.upload_id, link.file)
        about = await self._about(link.upload_id)
        owner: str = about["owner"]
        CALLER.set(Caller(owner, link.signature.key_id))
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
                    # This includes the files that the owner sends at the same time.
                    if self._checkpoints.unfinished_bytes[owner] > room:
                        raise self._checkpoints.no_room(owner)
                    await write(piece)
            async with self._lock(link.upload_id):
                try:
                    await self._about(link.upload_id)  # the upload may have finished or expired meanwhile
                except PermissionDenied:
                    await storage.remove_file(uri, part)
                    raise
                await storage.rename(uri, part, link.file)
                replaced = self._unfinished[link.upload_id][1][link.file]
                self._count(link.upload_id, owner, link.file, size - replaced)
        finally:
            # If the upload finished or was removed meanwhile, the bytes of the part are no longer counted.
            _, sizes = self._unfinished.get(link.upload_id, (owner, Counter[str]()))
            if counted := sizes[part]:
                self._count(link.upload_id, owner, part, -counted)

    async def finish(self, owner: str, upload_id: str) -> str:
        """Validates the files that were sent and makes them a checkpoint; returns its path. A second call returns the
        same path.

        Raises NotFound if the caller has no such upload, and InvalidInput for the first problem with its files; the
        client may then send them again.
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
            raise InvalidInput(f"{unsent[0]} has not been sent yet: PUT it to its URL", field="upload_id")
        lora = json_format.ParseDict(about["lora"], weights_pb2.LoraConfig())
        lora.alpha = await storage.run(check_config, await storage.read(uri, ADAPTER_CONFIG), lora.rank)
        await self._check_weights(uri, sizes[ADAPTER_WEIGHTS], lora.rank)
        try:
            await self._check_adapter(about["base_model"], uri, lora)
        except InvalidInput as error:
            raise InvalidInput(error.message, field="upload_id") from None
        await self._checkpoints.check_room(owner)
        size_bytes = sizes[ADAPTER_CONFIG] + sizes[ADAPTER_WEIGHTS]
        checkpoint = Checkpoint(
            path, upload_id, owner, EXTERNAL, _NAME, uri, about["base_model"], lora, size_bytes=size_bytes
        )
        # Without this file `receive` refuses further data, so the files that the new row names never change.
        await storage.remove_file(uri, _ABOUT)
        await storage.sync(uri)
        await self._database.write(lambda connection: put_row(connection, checkpoint))
        self._forget(upload_id)
        return path

    async def _check_weights(self, uri: str, size_bytes: int, rank: int) -> None:
        """Checks a safetensors file by its header alone. Raises InvalidInput."""
        storage = self._checkpoints.storage
        head = await self._read(uri, 0, min(8, size_bytes))
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
        if not 0 < length <= size_bytes - 8:
            raise InvalidInput(f"{ADAPTER_WEIGHTS} is not a safetensors file", field="upload_id")
        if length > _MOST_HEADER_BYTES:
            raise _too_large(f"the header of {ADAPTER_WEIGHTS}", _MOST_HEADER_BYTES)
        header = await self._read(uri, 8, length)
        await storage.run(check_header, header, size_bytes - 8 - length, rank)

    async def _read(self, uri: str, start: int, length: int) -> bytes:
        pieces = await self._checkpoints.storage.stream(uri, ADAPTER_WEIGHTS, start, length)
        return b"".join([piece async for piece in pieces])

    def _count(self, upload_id: str, owner: str, file: str, size_bytes: int) -> None:
        """Counts bytes of a file of an unfinished upload, until `_forget` is called."""
        _, sizes = self._unfinished.setdefault(upload_id, (owner, Counter()))
        sizes[file] += size_bytes
        self._checkpoints.unfinished_bytes[owner] += size_bytes

    def _forget(self, upload_id: str) -> None:
        """Stops counting an upload that has become a checkpoint or is gone."""
        owner, sizes = self._unfinished.pop(upload_id, ("", Counter[str]()))
        self._checkpoints.unfinished_bytes[owner] -= sizes.total()

    async def remove_expired(self) -> None:
        """Removes the folders of uploads that did not finish in time, and counts those that an earlier gateway left."""
        storage = self._checkpoints.storage
        found = {f"{storage.root}/{_FOLDER}/{name}" for name in await storage.entries(f"{storage.root}/{_FOLDER}")}
        held = set(await self._database.read(named_uris))
        for uri in found - held:
            match = _UPLOAD_ID.fullmatch(uri.rpartition("/")[2])
            if match is None:
                continue
            # An upload that expires just now may be finishing, so leave it for the next sweep.
            if int(match[1]) + _TTL_S < time.time():
                await storage.remove(uri)
                self._forget(match[0])
            elif match[0] not in self._unfinished:
                await self._count_left(match[0], uri)

    async def _count_left(self, upload_id: str, uri: str) -> None:
        with suppress(PermissionDenied):  # it has just expired
            about, sizes = await self._about(upload_id), await self._checkpoints.storage.sizes(uri)
            if upload_id not in self._unfinished:
                for file in sizes.keys() & {ADAPTER_CONFIG, ADAPTER_WEIGHTS}:
                    self._count(upload_id, about["owner"], file, sizes[file])

    async def _about(self, upload_id: str) -> dict[str, Any]:
        """Returns the recorded state of an upload. Raises PermissionDenied if it has ended."""
        match = _UPLOAD_ID.fullmatch(upload_id)
        gone = PermissionDenied("this upload is finished or has expired; start another one")
        if not match or int(match[1]) <= time.time():
            raise gone
        try:
            about: dict[str, Any] = json.loads(await self._checkpoints.storage.read(self._uri(upload_id), _ABOUT))
        except FileNotFoundError:
            raise gone from None
        return about

    def _lock(self, upload_id: str) -> asyncio.Lock:
        """Returns the lock to hold while files of an upload are renamed, and while they become a checkpoint."""
        return self._changing.setdefault(upload_id, asyncio.Lock())

    def _uri(self, upload_id: str) -> str:
        return f"{self._checkpoints.storage.root}/{_FOLDER}/{upload_id}"

    def _link(self, upload_id: str, file: str, expires_at: int) -> UploadLink:
        return UploadLink(upload_id, file, self._signer.sign(expires_at, _SIGNED_AS, upload_id, file))


def check_config(content: bytes, rank: int) -> float:
    """Returns the alpha of an adapter, after checking that Fovea can compute the adapter.

    Raises InvalidInput that names the first unsupported field.
    """
    config = _json_object(content, ADAPTER_CONFIG)
    if config.get("peft_type") != "LORA":
        raise _wrong_config("peft_type", config, "only LORA is supported")
    if config.get("r") != rank:
        raise _wrong_config("r", config, f"lora_config.rank of the upload is {rank}")
    if config.get("bias", "none") != "none":
        raise _wrong_config("bias", config, "only none is supported")
    for name in _UNSUPPORTED:
        if config.get(name):
            raise _wrong_config(name, config, "Fovea does not support adapters with this option")
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
    """Checks the header of a safetensors file: it must list pairs of LoRA factors of this rank.

    Args:
        header: The JSON header.
        data_bytes: The size of the file after the header.
        rank: The expected LoRA rank.

    Raises InvalidInput that names the first wrong tensor (https://github.com/huggingface/safetensors, Format).
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
            raise _wrong_tensor(name, "is not a LoRA factor: names must end with .lora_A.weight or .lora_B.weight")
        other = f"{match[1]}.lora_{'B' if match[2] == 'A' else 'A'}.weight"
        if other not in tensors:
            raise _wrong_tensor(name, f"has no {other} beside it")
        if tensor.dtype not in _ITEM_BYTES:
            raise _wrong_tensor(name, f"has type {tensor.dtype:.20}; only {', '.join(_ITEM_BYTES)} are supported")
        if len(tensor.shape) not in (2, 3) or tensor.shape[-2 if match[2] == "A" else -1] != rank:
            raise _wrong_tensor(name, f"has shape {list(tensor.shape)}, which does not match rank {rank}")
        if tensor.begin < 0 or tensor.end > data_bytes:
            raise _wrong_tensor(name, "is outside the file: the file is incomplete")
        if tensor.end - tensor.begin != math.prod(tensor.shape) * _ITEM_BYTES[tensor.dtype]:
            raise _wrong_tensor(name, "has a size that does not match its shape")


class _Tensor(NamedTuple):
    """The header entry of one tensor."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @classmethod
    def of(cls, entry: dict[str, Any]) -> "_Tensor":
        numbers = [*entry["shape"], *entry["data_offsets"]]
        if not all(type(number) is int for number in numbers) or not isinstance(entry["dtype"], str):
            raise ValueError("shape, data_offsets or dtype has the wrong type")
        begin, end = entry["data_offsets"]
        return cls(entry["dtype"], tuple(entry["shape"]), begin, end)


def _wrong_tensor(name: str, words: str) -> InvalidInput:
    return InvalidInput(f"{ADAPTER_WEIGHTS}: {name:.200} {words}", field="upload_id")


def _too_large(file: str, limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"{file} is larger than {limit} bytes, this gateway's limit for uploads", field="upload_id")
