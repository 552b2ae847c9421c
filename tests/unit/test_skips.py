"""Skipped tests prove nothing: CI lists its installed tools, and a test skipped for lack of one fails the run."""

import os
import subprocess
import sys

import pytest

FILE = "tests/unit/fovea_rollout/test_verifiers_environment.py"
"""Some of its tests are skipped with verifiers, others without."""


@pytest.mark.slow
@pytest.mark.parametrize(("must_run", "code"), [("PostgreSQL", 0), ("PostgreSQL,verifiers", 1)])
def test_a_skip_that_is_not_allowed_fails_the_run(must_run: str, code: int, pytestconfig: pytest.Config) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", FILE]
    environment = os.environ | {"FOVEA_MUST_RUN": must_run}
    done = subprocess.run(
        command, cwd=pytestconfig.rootpath, env=environment, capture_output=True, text=True, check=False
    )
    assert "skipped: " in done.stdout, done.stdout + done.stderr
    assert done.returncode == code, done.stdout
    assert ("not allowed by FOVEA_MUST_RUN" in done.stdout) == bool(code)
