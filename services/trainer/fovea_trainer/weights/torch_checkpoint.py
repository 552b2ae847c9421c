"""Checkpoints of torch.distributed.checkpoint (DCP) in fsspec file systems, written durably and read as plain data."""

import io
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, cast

from torch.distributed.checkpoint._fsspec_filesystem import FileSystem, FsspecReader, FsspecWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from fovea.runtime.durable import SteadyFile, naming_full_disk
from fovea.wire.errors import InvalidInput
from fovea_trainer.ranks.control_group import MetadataUnpickler
from fovea_trainer.weights.checkpoint_folder import Checksums


class WrittenFiles(FileSystem):
    """The file system of a checkpoint under construction. A full disk raises an error that names the checkpoint.

    Args:
        destination: Final path of the checkpoint.
        is_summed: True to compute the checksums of written files.
    """

    def __init__(self, destination: str, is_summed: bool) -> None:
        super().__init__()
        self._destination, self._is_summed = destination, is_summed
        self.checksums: Checksums = {}
        """CRC-32 by file name; all files are in one folder."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Opens a file as FileSystem does.

        Raises:
            DiskFull: The disk is full.
        """
        with naming_full_disk(self._destination), super().create_stream(path, mode) as stream:
            if "w" not in mode:
                yield stream
                return
            with SteadyFile(stream, self._is_summed) as file:
                yield cast(io.IOBase, file)
            if self._is_summed:
                self.checksums[os.path.basename(path)] = file.checksum

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        if (found := self.checksums.pop(os.path.basename(path), None)) is not None:
            self.checksums[os.path.basename(new_path)] = found


class Writer(FsspecWriter):
    """A torch checkpoint writer for a checkpoint with the final path `destination`."""

    def __init__(self, url: str, destination: str, is_summed: bool) -> None:
        super().__init__(url)
        self.written = WrittenFiles(destination, is_summed)
        self.fs = self.written  # type: ignore[assignment]
        self.path = self.fs.init_path(url)


class PlainReader(FsspecReader):
    """A torch checkpoint reader that unpickles only plain metadata.

    Torch itself loads tensor files with `weights_only`.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Reads the checkpoint's metadata as FsspecReader does.

        Raises:
            InvalidInput: The file is not checkpoint metadata.
        """
        path = self._get_metadata_path(kwargs.get("rank"))
        try:
            with self.fs.create_stream(path, "rb") as file:
                found: Metadata = MetadataUnpickler(file).load()
        except (
            pickle.UnpicklingError,
            EOFError,
            AttributeError,
            ImportError,
            IndexError,
            TypeError,
            ValueError,
        ) as error:
            raise InvalidInput(f"{path} is not the metadata of a checkpoint: {error}", field="uri") from None
        files = found.storage_data.values() if isinstance(found, Metadata) else [None]
        if not all(isinstance(file, _StorageInfo) and "/" not in file.relative_path for file in files):
            raise InvalidInput(f"{path} refers to files outside its own folder", field="uri")
        found.storage_meta = found.storage_meta or StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class TensorPlanner(DefaultLoadPlanner):
    """A load planner that accepts tensors only: torch would unpickle any other entry."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> NoReturn:
        """Rejects an entry that is not a tensor.

        Raises:
            InvalidInput: Always; names the entry.
        """
        raise InvalidInput(f"{read_item.storage_index.fqn} is not a tensor", field="uri")
