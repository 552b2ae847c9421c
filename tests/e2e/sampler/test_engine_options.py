"""Options for vLLM reach the engine, and an invalid one ends the start with its name."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from fovea.api.v1 import sampler_pb2
from fovea.client.inference import SamplerClient
from tests.e2e.sampler.asking import ask, rendered, request_for
from tests.e2e.sampler.process import SamplerProcess, running_sampler

_VARIABLE = "FOVEA_SAMPLER_ENGINE_ARGUMENTS"
_HAS_FP8 = bool({"avx512f", "amx_tile"} & set(Path("/proc/cpuinfo").read_text().split()))
"""vLLM's FP8 cache on a CPU needs one of these features."""


@pytest.fixture(scope="module")
def small(model: Path) -> Iterator[SamplerProcess]:
    """A sampler with an FP8 cache, if the processor supports it, and another digest for blocks."""
    cache = ("--kv-cache-dtype", "fp8") if _HAS_FP8 else ()
    with (
        mock.patch.dict(os.environ, {_VARIABLE: '{"prefix_caching_hash_algo": "sha256_cbor"}'}),
        running_sampler(model, *cache, is_copy=True) as sampler,
    ):
        yield sampler


def test_an_argument_reaches_the_engine(small: SamplerProcess, sampler: SamplerProcess) -> None:
    assert 'prefix_caching_hash_algo="sha256_cbor"' in small.metrics_page()
    assert 'prefix_caching_hash_algo="sha256"' in sampler.metrics_page()


@pytest.mark.skipif(not _HAS_FP8, reason="vLLM has no FP8 cache on a processor without AVX-512 or AMX")
async def test_a_cache_of_bytes_holds_more_and_rounds(
    client: SamplerClient, sampler: SamplerProcess, small: SamplerProcess
) -> None:
    """It holds four times the tokens of a float32 cache. The log-probabilities of draws equal the sampler's own later
    scores.
    """
    ids = np.random.default_rng(0).integers(100, 1000, 200).tolist()
    scored = request_for(rendered([ids]), prompt_logprobs=True, max_tokens=1)
    through = sampler_pb2.StopCondition(ignore_eos=True)
    async with SamplerClient(small.address) as other:
        exact, rounded = (await ask(client, scored)).prompt_logprobs, (await ask(other, scored)).prompt_logprobs
        (drawn,) = (await ask(other, request_for(rendered([ids]), max_tokens=40, stop=through))).sequences
        whole = request_for(rendered([ids + drawn.tokens]), prompt_logprobs=True, max_tokens=1)
        again = (await ask(other, whole)).prompt_logprobs
    assert tokens_of(small) == pytest.approx(4 * tokens_of(sampler), rel=0.01)
    assert exact is not None
    assert rounded is not None
    assert again is not None
    difference = (rounded - exact)[1:].astype(np.float64)
    assert 1e-4 < np.mean(np.exp(difference) - 1 - difference) < 1e-2
    np.testing.assert_allclose(drawn.logprobs, again[-40:], atol=1e-3)


def tokens_of(sampler: SamplerProcess) -> int:
    """Returns the capacity of the KV cache in tokens."""
    found = re.search(r'kv_cache_size_tokens="(\d+)"', sampler.metrics_page())
    assert found
    return int(found[1])


def test_a_wrong_one_ends_the_start_with_its_name(model: Path) -> None:
    """tests/unit/fovea/cli/test_supervisor.py tests that `fovea up` passes the options on and ends with the service's
    message.
    """
    command = [sys.executable, "-m", "fovea_sampler", "--model", str(model), "--metrics-port", "0"]
    variables = os.environ | {_VARIABLE: '{"gdn_prefil_backend": "triton"}'}
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    words = "--engine-arguments: vLLM has no engine argument gdn_prefil_backend; did you mean 'gdn_"
    assert ended.stderr.splitlines()[-1].startswith(f"fovea_sampler: {words}")
    assert "Traceback" not in ended.stderr
