"""Trains on your own data: prepares pictures and chats for the Tinker API, and fine-tunes a model in ten lines.

Works with any Tinker server. Names are imported on first use. The SDK takes seconds to load, so it is loaded when used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fovea_data.conversation import Conversation as Conversation
    from fovea_data.conversation import RowReader as RowReader
    from fovea_data.dataset import Dataset as Dataset
    from fovea_data.dataset import image_folder as image_folder
    from fovea_data.dataset import load_chats as load_chats
    from fovea_data.encoder import Encoder as Encoder
    from fovea_data.fine_tuning import FineTuneSettings as FineTuneSettings
    from fovea_data.fine_tuning import fine_tune as fine_tune
    from fovea_data.hub_upload import push_to_hub as push_to_hub
    from fovea_data.model_export import export_model as export_model
    from fovea_data.picture_tokens import PictureTokens as PictureTokens
    from fovea_data.picture_tokens import token_count as token_count
    from fovea_data.tuned_model import TunedModel as TunedModel
    from fovea_rollout.pictures import read_picture as read_picture

_PUBLIC = {
    "conversation": ("Conversation", "RowReader"),
    "dataset": ("Dataset", "image_folder", "load_chats"),
    "encoder": ("Encoder",),
    "fine_tuning": ("FineTuneSettings", "fine_tune"),
    "hub_upload": ("push_to_hub",),
    "model_export": ("export_model",),
    "picture_tokens": ("PictureTokens", "token_count"),
    "tuned_model": ("TunedModel",),
}
_MODULE_OF = {name: f"{__name__}.{module}" for module, names in _PUBLIC.items() for name in names}
_MODULE_OF["read_picture"] = "fovea_rollout.pictures"


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
