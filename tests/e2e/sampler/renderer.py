"""A small renderer over real gRPC: the checkpoint's own image processor, and tensors by digest."""

import contextlib
import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np
import numpy.typing as npt
from PIL import Image
from transformers import AutoConfig, AutoImageProcessor

from fovea.api.v1 import model_input_pb2, renderer_pb2, renderer_pb2_grpc
from fovea.wire.tensors import FeatureTensors, iter_pieces, size_bytes, tensors_sha256


@dataclass
class TinyRenderer(renderer_pb2_grpc.RendererServiceServicer):
    """Serves FetchFeatures for the images that `render` has seen."""

    model: Path
    address: str = ""
    features: dict[str, FeatureTensors] = field(default_factory=dict)
    fetched: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._processor = AutoImageProcessor.from_pretrained(self.model)
        self.image_opener_id: int = AutoConfig.from_pretrained(self.model).vision_start_token_id

    def render(self, pixels: npt.NDArray[np.uint8]) -> model_input_pb2.VisionFeature:
        """Renders an RGB image, uint8 [height, width, 3]."""
        batch = self._processor([Image.fromarray(pixels)], return_tensors="pt", do_rescale=False, do_normalize=False)
        tensors = {
            "pixel_values": batch["pixel_values"].numpy(),
            "image_grid_thw": batch["image_grid_thw"].numpy(),
        }
        digest = hashlib.sha256(pixels.tobytes() + str(pixels.shape).encode()).hexdigest()
        self.features[digest] = tensors
        return model_input_pb2.VisionFeature(
            digest=digest,
            token_count=int(np.prod(tensors["image_grid_thw"])) // self._processor.merge_size**2,
            size_bytes=size_bytes(tensors),
            source=self.address,
            tensors_sha256=tensors_sha256(tensors),
        )

    def FetchFeatures(  # noqa: N802
        self, request: renderer_pb2.FetchFeaturesRequest, context: grpc.ServicerContext
    ) -> Iterator[renderer_pb2.FetchFeaturesResponse]:
        """See renderer.proto."""
        for digest in request.digests:
            if digest not in self.features:
                context.abort(grpc.StatusCode.NOT_FOUND, f"image {digest} is not held")
            self.fetched.append(digest)
            yield from iter_pieces(digest, self.features[digest])


@contextlib.contextmanager
def running_renderer(model: Path) -> Iterator[TinyRenderer]:
    """A renderer that serves on a free port."""
    renderer = TinyRenderer(model)
    server = grpc.server(ThreadPoolExecutor(4))
    renderer_pb2_grpc.add_RendererServiceServicer_to_server(renderer, server)
    renderer.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield renderer
    finally:
        server.stop(None)
