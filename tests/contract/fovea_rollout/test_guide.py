"""The first program of the reinforcement-learning guide runs unchanged against a gateway."""

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fovea_tinyvlm
from tests.contract.gateway import fakes
from tests.contract.gateway.conftest import KEY, Stand, running

GUIDE = Path(__file__).parents[3] / "docs/guides/rollout.md"
_SHORT = "LoopSettings(2, 1, 2, learning_rate=1e-4, kl_coefficient=0.0, substeps=1, loss='importance_sampling')"


async def test_the_program_of_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fakes, "VOCABULARY_SIZE", 1280)
    program = re.search(r"^```python\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    assert program is not None
    async with running(Stand(tmp_path / "gateway"), model=str(fovea_tinyvlm.ensure())) as stand:
        text = program[1].replace("http://127.0.0.1:8000", stand.url).replace("tml-local", KEY)
        (tmp_path / "program.py").write_text(text.replace("LoopSettings()", _SHORT))
        command = [sys.executable, str(tmp_path / "program.py")]
        given = {name: value for name, value in os.environ.items() if not name.startswith("TINKER_")}
        environment = given | {"TINKER_TELEMETRY": "0"}
        ended = await asyncio.to_thread(
            subprocess.run, command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=200
        )
        async with stand.http() as http:
            (run,) = (await http.get("training_runs")).json()["training_runs"]
            curves = (await http.get(f"live/curves/{run['training_run_id']}")).json()["curves"]
    assert curves["reward"]["step"] == [1, 2], "rewards are on the live page of the server that connect() names"
    assert ended.returncode == 0, ended.stderr
    assert "DEPRECATED" not in ended.stderr
    lines = ended.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["step 1", "step 2"], "expected one line for each step"
