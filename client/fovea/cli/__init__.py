"""The `fovea` command."""

import os

# gRPC reads this variable when it is imported. Its default starts threads in a child between fork and exec, while the
# child closes their descriptors: of 100 services, one ended with SIGABRT (grpcio 1.83.2). Services get the given value.
FORK_SUPPORT = "GRPC_ENABLE_FORK_SUPPORT"
GIVEN_FORK_SUPPORT = os.environ.get(FORK_SUPPORT)
os.environ.setdefault(FORK_SUPPORT, "0")
