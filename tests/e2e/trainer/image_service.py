"""A renderer in the test's process: the Hugging Face image processor behind gRPC."""

import hashlib
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from transformers import AutoConfig, AutoImageProcessor

from fovea.api.v1 import model_input_pb2, renderer_pb2, renderer_pb2_grpc
from fovea.wire import tensors
from fovea.wire.tensors import FeatureTensors, iter_pieces, size_bytes, tensors_sha256

Chunk = list[int] | Image.Image


class ImageService(renderer_pb2_grpc.RendererServiceServicer):
    """Renders chunks as the real renderer does and serves features by digest.

    Args:
        model_dir: The checkpoint with the processor.
        rope_index: The reference model's own `get_rope_index`.
    """

    def __init__(self, model_dir: Path, rope_index: Any) -> None:
        self.config = AutoConfig.from_pretrained(model_dir)
        has_vision = hasattr(self.config, "vision_config")
        self.processor = AutoImageProcessor.from_pretrained(model_dir) if has_vision else None
        self.features: dict[str, FeatureTensors] = {}
        self.fetched: list[str] = []
        self._rope_index = rope_index
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        renderer_pb2_grpc.add_RendererServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def close(self) -> None:
        """Stops serving."""
        self._server.stop(None)

    def FetchFeatures(self, request: renderer_pb2.FetchFeaturesRequest, context: grpc.ServicerContext) -> Any:  # noqa: N802
        for digest in request.digests:
            self.fetched.append(digest)
            if digest not in self.features:
                context.abort(grpc.StatusCode.NOT_FOUND, f"digest {digest} is not held")
            yield from iter_pieces(digest, self.features[digest])

    def render(self, chunks: list[Chunk]) -> model_input_pb2.RenderedInput:
        """Splices tokens and images; positions come from the model's own code."""
        rendered = model_input_pb2.RenderedInput()
        ids: list[int] = []
        grids: list[list[int]] = []
        for chunk in chunks:
            if isinstance(chunk, list):
                ids += chunk
                continue
            feature = self._feature(chunk)
            rendered.spans.add(offset=len(ids), length=feature.token_count, feature=feature)
            ids += [self.config.image_token_id] * feature.token_count
            grids.append(self.features[feature.digest]["image_grid_thw"][0].tolist())
        rendered.tokens = tensors.encode_tokens(ids)
        if grids:
            rendered.positions.CopyFrom(tensors.encode(self.positions(ids, grids).astype(np.int32)))
        return rendered

    def positions(self, ids: list[int], grids: list[list[int]]) -> npt.NDArray[np.int64]:
        """Returns the positions, int64 [3, N]."""
        tokens = torch.tensor([ids])
        kinds = (tokens == self.config.image_token_id).int()
        positions, _ = self._rope_index(tokens, kinds, image_grid_thw=torch.tensor(grids))
        return positions[:, 0].numpy()

    def _feature(self, image: Image.Image) -> model_input_pb2.VisionFeature:
        made = self.processor([image], return_tensors="np", do_rescale=False, do_normalize=False)
        feature = {
            "pixel_values": np.asarray(made["pixel_values"]).astype(np.uint8),
            "image_grid_thw": np.asarray(made["image_grid_thw"]).astype(np.int64),
        }
        digest = hashlib.sha256(image.tobytes() + str(image.size).encode()).hexdigest()
        self.features[digest] = feature
        return model_input_pb2.VisionFeature(
            digest=digest,
            token_count=int(np.prod(feature["image_grid_thw"])) // self.config.vision_config.spatial_merge_size**2,
            size_bytes=size_bytes(feature),
            source=self.address,
            tensors_sha256=tensors_sha256(feature),
        )


def picture(width: int, height: int, seed: int) -> Image.Image:
    """Returns a colourful image without a pattern."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)
