"""What several processes must call alike: gRPC services, and the files and folders of checkpoints."""

GATEWAY_SERVICE = "fovea.api.v1.GatewayService"
RENDERER_SERVICE = "fovea.api.v1.RendererService"
SAMPLER_SERVICE = "fovea.api.v1.SamplerService"
TRAINER_SERVICE = "fovea.api.v1.TrainerService"

SNAPSHOT_FILE = "fovea_snapshot.json"
"""In a folder of weights: whose they are, a `weights_pb2.Snapshot` as JSON."""

# A process that dies may leave folders behind which have one of these after their name; the gateway removes them.

STAGING_SUFFIX = ".tmp-"
"""A folder that is being written, and will take the place of the one it is named for."""

REPLACED_SUFFIX = ".old-"
"""A folder that has lost its place, and is to be removed."""

PLAIN_SUFFIX = ".plain"
"""An export before it is encrypted."""
