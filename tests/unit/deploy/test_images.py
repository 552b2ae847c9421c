"""The build of images; tests/images runs the built ones."""

import os
import subprocess
import sys
from pathlib import Path

from deploy.images.build import images
from deploy.images.engine import PACKAGES
from tests.unit.deploy.chart import ROOT
from tests.unit.deploy.test_docker import DOCKERFILES


def test_every_image_of_compose_is_built_as_it_says() -> None:
    options = images()
    assert set(options) == {
        "fovea/gateway:0.1.0",
        "fovea/renderer:0.1.0",
        "fovea/sampler:0.1.0-cpu",
        "fovea/trainer:0.1.0",
    }
    for image, words in options.items():
        service = image.removeprefix("fovea/").partition(":")[0]
        assert words[0] == f"--file={DOCKERFILES[service]}"
        assert words[1:] == (["--build-arg=EXTRA=cpu"] if service == "sampler" else [])


def test_without_an_engine_it_says_what_to_install(tmp_path: Path) -> None:
    environment = os.environ | {"PATH": str(tmp_path), "PYTHONPATH": str(ROOT), "FOVEA_CACHE": str(tmp_path)}
    command = [sys.executable, "-m", "deploy.images", "build"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("skipped: ")
    assert (PACKAGES if os.geteuid() == 0 else "as root") in done.stdout
    assert list(tmp_path.iterdir()) == []
