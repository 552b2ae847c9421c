"""A sampler's channels to renderers."""

from fovea_sampler import generation
from fovea_sampler.generation import ImageFetcher


async def test_channels_to_renderers_that_are_gone_are_closed() -> None:
    fetcher = ImageFetcher(None, 2**20, "")
    first = fetcher._client("127.0.0.1:1")
    for port in range(2, generation._MOST_RENDERERS + 1):
        fetcher._client(f"127.0.0.1:{port}")
    assert fetcher._client("127.0.0.1:1") is first, "requested again, so that another one is the oldest"
    fetcher._client("127.0.0.1:9999")
    assert len(fetcher._clients) == generation._MOST_RENDERERS
    assert "127.0.0.1:2" not in fetcher._clients
    assert fetcher._client("127.0.0.1:1") is first
    await fetcher.close()
