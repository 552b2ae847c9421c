"""Options of vLLM that a sampler is started with: they arrive, and a wrong one ends the start with its name."""

from pathlib import Path

import pytest

from demo.up import NotReady, running_fovea
from fovea.client.sampler import SamplerClient
from tests.e2e.sampler.asking import ask, rendered, request_for
from tests.e2e.sampler.process import running_sampler

_VARIABLE = "FOVEA_SAMPLER_ENGINE_ARGUMENTS"


async def test_an_argument_reaches_the_engine(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_VARIABLE, '{"num_gpu_blocks_override": 345}')
    with running_sampler(model) as sampler:
        async with SamplerClient(sampler.address) as client:
            answer = await ask(client, request_for(rendered([[1, 2, 3]]), max_tokens=4))
        assert len(answer.sequences[0].tokens) <= 4
        assert 'num_gpu_blocks="345"' in sampler.metrics_page()


def test_fovea_up_hands_them_on_and_ends_with_what_is_wrong(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(_VARIABLE, '{"gdn_prefil_backend": "triton"}')
    words = "services.sampler: --engine-arguments: vLLM has no engine argument gdn_prefil_backend; the nearest is gdn_"
    with pytest.raises(NotReady, match=words), running_fovea(tmp_path, model, "--port", "0", "--grpc-port", "0"):
        pass
    assert "Traceback" not in (tmp_path / "up.log").read_text()
