"""Two owners on one Fovea: a key created while it runs, and caches that do not reveal other owners' prompts."""

import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import pytest
import tinker

from tests.e2e.stack import Stack

pytestmark = pytest.mark.slow

LENGTH = 128
PARAMS = tinker.SamplingParams(max_tokens=1, temperature=0.0)


@pytest.fixture
def other(stack: Stack) -> Iterator[tinker.ServiceClient]:
    """The SDK with a key of another owner, which is revoked afterwards."""
    folder = ("--state-dir", str(stack.log.parent))

    def keys(*arguments: str) -> str:
        command = [sys.executable, "-m", "fovea.cli.main", "keys", *arguments, *folder]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    key = keys("create", "--owner", "guesser").strip()
    deadline = time.monotonic() + 60
    headers = {"X-API-Key": key}
    while httpx.get(f"{stack.base_url}/api/v1/sessions", headers=headers, timeout=60).status_code != 200:
        assert time.monotonic() < deadline, "the new key must be accepted"
        time.sleep(0.1)
    with tinker.ServiceClient(base_url=stack.base_url, api_key=key) as client:
        yield client
    for line in keys("list").splitlines()[1:]:
        key_id, owner, *_ = line.split()
        if owner == "guesser":
            keys("revoke", key_id)


def hits(sampler: tinker.SamplingClient, tokens: list[int]) -> int:
    """Returns the number of a prompt's tokens that the server reports as cached."""
    response = sampler.sample(tinker.ModelInput.from_ints(tokens), 1, PARAMS).result()
    return int(response.prompt_cache_hit_tokens)


def test_a_guess_of_anothers_prompt_is_not_confirmed(
    stack: Stack, base_sampler: tinker.SamplingClient, other: tinker.ServiceClient
) -> None:
    secret, another = ([700 + (i * step) % 211 for i in range(LENGTH + 1)] for step in (37, 41))
    for prompt in (secret, another):
        assert hits(base_sampler, prompt) == 0
        assert hits(base_sampler, prompt) > LENGTH // 2, "an owner's own prompts must be cached"
    guesser = other.create_sampling_client(base_model=stack.model_name).result()
    assert hits(guesser, secret) == 0
    assert hits(guesser, another[: LENGTH // 2 + 1]) == 0
    assert hits(guesser, secret) > LENGTH // 2, "its own prompt must be"
