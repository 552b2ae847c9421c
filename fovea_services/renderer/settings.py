"""The renderer's settings."""

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from fovea.runtime.settings import ServiceSettings

GIB = 2**30


class RendererSettings(ServiceSettings):
    """Renders model inputs for one model: images become placeholder tokens and vision tensors.

    Every setting is also an environment variable, FOVEA_RENDERER_ and its name in capitals with underscores.
    """

    model_config = SettingsConfigDict(env_prefix="FOVEA_RENDERER_", cli_prog_name="python -m fovea_services.renderer")

    model: str = Field(description="Model directory, or hub name; weights are not read.")
    advertise: str = Field(
        "", description="Address host:port that samplers and trainers fetch tensors from; empty is where this listens."
    )
    workers: int = Field(
        1, ge=1, le=256, description="Image worker processes, one image each at a time; about 0.8 GiB each."
    )
    worker_memory_bytes: int = Field(
        4 * GIB, ge=0, description="Memory of one image worker; more ends its image, not the service. 0 is no limit."
    )
    image_timeout_s: float = Field(60.0, gt=0, description="Seconds that one image may take in a worker.")
    start_timeout_s: float = Field(300.0, gt=0, description="Seconds that a worker may take to start.")
    max_pending_images: int = Field(
        256, ge=1, description="Images that may wait or run; more are refused with RESOURCE_EXHAUSTED."
    )
    feature_cache_bytes: int = Field(2 * GIB, ge=1, description="Vision tensors held; the longest unused go first.")
    image_store_bytes: int = Field(GIB // 2, ge=1, description="Uploaded images held; the longest unused go first.")
    max_context_length: int | None = Field(
        None, ge=1, description="Most tokens of one input; none is what the model's configuration says."
    )
    image_hosts: list[str] = Field(
        [],
        description="Hosts that images may be fetched from by address, as JSON or repeated: names, addresses, networks."
        " A host with a private address needs that listed too. Empty: none.",
    )
    image_fetch_timeout_s: float = Field(10.0, gt=0, description="Seconds that fetching one image may take.")
