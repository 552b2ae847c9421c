"""Examples. The SDK is loaded when it is used, after the address of the server has been checked."""

import fovea_rollout  # noqa: F401
