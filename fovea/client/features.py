"""A blocking fetcher of vision tensors, for processes that have no event loop, such as trainer ranks."""

import grpc

from fovea.api.v1 import model_input_pb2, renderer_pb2, renderer_pb2_grpc
from fovea.client.channel import OPTIONS
from fovea.runtime import secret, tracing
from fovea.wire.errors import Internal, from_rpc_error
from fovea.wire.features import FeatureAssembler, FeatureTensors, tensors_sha256


class FeatureFetcher:
    """Fetches the tensors of rendered images from the renderers that hold them, and checks what arrives."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.Channel] = {}
        self._metadata = secret.metadata()

    def fetch(
        self, features: list[model_input_pb2.VisionFeature], timeout_s: float = 60.0
    ) -> dict[str, FeatureTensors]:
        """Tensors by digest, each checked against its `tensors_sha256`.

        Raises FeatureEvicted if a renderer no longer holds one, Internal if bytes differ from what was promised.
        """
        by_source: dict[str, dict[str, model_input_pb2.VisionFeature]] = {}
        for feature in features:
            by_source.setdefault(feature.source, {})[feature.digest] = feature
        fetched: dict[str, FeatureTensors] = {}
        for source, wanted in by_source.items():
            fetched |= self._fetch_from(source, wanted, timeout_s)
        return fetched

    def close(self) -> None:
        """Closes all channels."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()

    def _fetch_from(
        self, source: str, wanted: dict[str, model_input_pb2.VisionFeature], timeout_s: float
    ) -> dict[str, FeatureTensors]:
        if source not in self._channels:
            self._channels[source] = grpc.insecure_channel(source, options=OPTIONS)
        stub = renderer_pb2_grpc.RendererServiceStub(self._channels[source])
        assembler = FeatureAssembler()
        fetched: dict[str, FeatureTensors] = {}
        try:
            request = renderer_pb2.FetchFeaturesRequest(digests=list(wanted))
            for piece in stub.FetchFeatures(request, timeout=timeout_s, metadata=tracing.metadata(self._metadata)):
                if complete := assembler.feed(piece):
                    fetched[complete[0]] = complete[1]
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        for digest, feature in wanted.items():
            check_feature(feature, fetched.get(digest))
        return fetched


def check_feature(feature: model_input_pb2.VisionFeature, tensors: FeatureTensors | None) -> None:
    """Raises Internal unless the tensors are the ones that the renderer promised in `feature`."""
    if tensors is None:
        raise Internal(f"the renderer at {feature.source} sent no tensors for image {feature.digest}")
    if (found := tensors_sha256(tensors)) != feature.tensors_sha256:
        raise Internal(
            f"the tensors of image {feature.digest} from {feature.source} have digest {found}, not "
            f"{feature.tensors_sha256}"
        )
