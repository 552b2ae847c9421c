"""A standalone sampler listens only at the configured addresses."""

import psutil

from tests.e2e.sampler.process import SamplerProcess
from tests.listeners import listeners, unasked


def test_a_sampler_listens_where_it_is_asked_to(sampler: SamplerProcess) -> None:
    service = psutil.Process(sampler.process.pid)
    everything = [service, *service.children(recursive=True)]
    asked = {sampler.address, sampler.metrics_address}
    assert asked <= listeners(everything).keys()
    assert not unasked(everything, asked)
