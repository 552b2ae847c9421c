"""What sampler and trainer say of their GPUs' memory, against what CUDA says of the same device."""

import os
import urllib.request

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.stack import Stack

_OTHERS_BYTES = 4 * 2**30
"""Room for what the two readings may differ by: they are moments apart, and the driver keeps some for itself."""


@pytest.mark.parametrize("service", ["sampler", "trainer"])
def test_memory_of_the_gpus_is_in_the_metrics(stack: Stack, service: str) -> None:
    with urllib.request.urlopen(stack.state["services"][service]["metrics"], timeout=30) as page:
        families = list(text_string_to_metric_families(page.read().decode()))
    (family,) = [one for one in families if one.name == "fovea_gpu_memory_bytes"]
    found = {(one.labels["device"], one.labels["kind"]): one.value for one in family.samples}
    devices = {device for device, _ in found}
    assert devices
    for device in devices:
        free, total = torch.cuda.mem_get_info(_index(device))
        assert abs(found[device, "total"] - total) < _OTHERS_BYTES
        assert abs(found[device, "used"] - (total - free)) < _OTHERS_BYTES
        assert found[device, "used"] > 2**28, "a model and a CUDA context"


def _index(device: str) -> int:
    """The number by which this process knows a device of the driver's."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",").index(device) if visible else int(device)
