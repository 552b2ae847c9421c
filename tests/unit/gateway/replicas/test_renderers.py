"""The reported info of renderers that join and leave."""

from types import SimpleNamespace
from typing import Any

import pytest

from fovea.api.v1 import renderer_pb2
from fovea.wire.errors import Unavailable
from fovea_gateway.replicas.renderers import Renderers


async def test_info_comes_from_a_renderer_that_is_still_there() -> None:
    unused: Any = None
    renderers = Renderers(unused, 1, 0.0, unused, unused)
    with pytest.raises(Unavailable):
        await renderers.info()
    members: dict[str, Any] = renderers._members
    first, second = (renderer_pb2.GetRendererInfoResponse(vocabulary_size=size) for size in (100, 200))
    members["first"] = SimpleNamespace(info=first)
    assert await renderers.info() is first
    members["second"] = SimpleNamespace(info=second)
    del members["first"]
    assert await renderers.info() is second
    members.clear()
    assert await renderers.info() is second, "none is available now, so the last known info is used"
