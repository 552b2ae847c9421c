"""Reads what torch.distributed.checkpoint wrote, without running anything that somebody else put there."""

import io
import pickle
from typing import Any, NoReturn

from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from fovea.wire.errors import InvalidInput
from services.trainer.ranks.plain_pickle import MetadataUnpickler


class PlainReader(FsspecReader):
    """Reads the description of a checkpoint as plain data; files of tensors torch itself reads so."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """As FsspecReader does. Raises InvalidInput for what is no description of a checkpoint."""
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
            raise InvalidInput(f"{path} is no checkpoint's description: {error}", field="uri") from None
        files = found.storage_data.values() if isinstance(found, Metadata) else [None]
        if not all(isinstance(file, _StorageInfo) and "/" not in file.relative_path for file in files):
            raise InvalidInput(f"{path} does not describe files of its own folder", field="uri")
        found.storage_meta = found.storage_meta or StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class TensorPlanner(DefaultLoadPlanner):
    """Loads tensors alone: for anything else torch would unpickle whatever is there."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> NoReturn:
        """Raises InvalidInput."""
        raise InvalidInput(f"{read_item.storage_index.fqn} is no tensor", field="uri")
