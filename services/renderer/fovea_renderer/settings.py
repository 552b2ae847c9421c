"""The settings of the renderer."""

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from fovea.runtime.settings import ServiceSettings

GIB = 2**30


class RendererSettings(ServiceSettings):
    """Renders inputs for one model: converts images into placeholder tokens and vision tensors.

    Each setting can also be an environment variable: FOVEA_RENDERER_ followed by its name in upper case.
    """

    model_config = SettingsConfigDict(env_prefix="FOVEA_RENDERER_", cli_prog_name="python -m fovea_renderer")

    model: str = Field(description="Model directory or hub name. The weights are not needed.")
    advertise: str = Field(
        "",
        description="host:port from which samplers and trainers fetch tensors; by default the address on which the "
        "renderer listens.",
    )
    workers: int = Field(
        1,
        ge=1,
        le=256,
        description="Image worker processes. Each processes one image at a time and needs about 0.8 GiB.",
    )
    worker_memory_bytes: int = Field(
        4 * GIB,
        ge=0,
        description="The most memory of one image worker, in bytes. An image that needs more fails, the service "
        "continues. 0 is no limit.",
    )
    image_timeout_s: float = Field(60.0, gt=0, description="Seconds that a worker may take for one image.")
    start_timeout_s: float = Field(300.0, gt=0, description="Seconds that a worker may take to start.")
    max_pending_images: int = Field(
        256,
        ge=1,
        description="The most images that wait or are being processed; further images are refused with "
        "RESOURCE_EXHAUSTED.",
    )
    feature_cache_bytes: int = Field(
        2 * GIB, ge=1, description="Bytes of cached vision tensors; the least recently used are evicted first."
    )
    image_store_bytes: int = Field(
        GIB // 2, ge=1, description="Bytes of cached uploaded images; the least recently used are evicted first."
    )
    max_context_length: int | None = Field(
        None, ge=1, description="The most tokens of one input; the limit in the model's configuration by default."
    )
    image_hosts: list[str] = Field(
        [],
        description="Hosts from which images may be fetched by URL: names, IP addresses or networks, as JSON or by "
        "repeating the option. If a host has a private address, list that address too. Empty allows no host.",
    )
    image_fetch_timeout_s: float = Field(
        10.0, gt=0, description="Seconds that the renderer may take to fetch an image."
    )
