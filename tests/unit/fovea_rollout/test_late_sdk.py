"""The libraries load the Tinker SDK when they use it, so that a wrong address is reported before."""

import subprocess
import sys

import pytest

from fovea.runtime.hosts import free_ports
from tests.client_environment import client_environment

_PROGRAM = """
import sys, threading
from fovea_data import FineTuneSettings, fine_tune, image_folder
from fovea_rollout import ChatTemplate, LoopSettings, TinkerPolicy, connect, train, warm_up
from fovea_rollout.late_sdk import tinker
for call in (lambda: connect({url!r}, "tml-key"), lambda: fine_tune([], base_url={url!r}, api_key="tml-key")):
    try:
        call()
    except Exception as error:
        print(error)
print("tinker.lib" in sys.modules)
names = []
threads = [threading.Thread(target=lambda: names.append(tinker.ServiceClient.__name__)) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(*names)
import tinker as real
from tinker.types import ImageChunk
print(hasattr(tinker, "nothing_of_this_name"), tinker.types.ImageChunk is ImageChunk, real.types is tinker.types)
"""


@pytest.mark.slow
def test_a_wrong_address_is_reported_before_the_sdk_is_loaded_which_any_thread_then_does() -> None:
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM.format(url=url)],
        env=client_environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    first, second, is_loaded, names, last = done.stdout.splitlines()
    assert f"no server responds at {url}" in first, done.stderr
    assert first == second
    assert is_loaded == "False"
    assert names.split() == ["ServiceClient"] * 4
    assert last == "False True True"
