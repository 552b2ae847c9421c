"""The programs of the reinforcement-learning guide run against a gateway, the first one unchanged."""

import asyncio
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import fovea_tinyvlm
from tests.client_environment import client_environment
from tests.code_blocks import programs
from tests.contract.gateway import fakes
from tests.contract.gateway.conftest import KEY, Stand, running

_SHORT = "LoopSettings(2, 1, 2, learning_rate=1e-4, kl_coefficient=0.0, substeps=1, loss='importance_sampling')"


async def _run(program: str, stand: Stand, folder: Path) -> list[str]:
    """Runs a program and returns the lines that it prints."""
    text = program.replace("http://127.0.0.1:8000", stand.url).replace("tml-local", KEY)
    (folder / "program.py").write_text(text.replace("LoopSettings()", _SHORT))
    command = [sys.executable, str(folder / "program.py")]
    environment = {name: value for name, value in client_environment().items() if not name.startswith("TINKER_")}
    environment |= {"TINKER_TELEMETRY": "0"}
    ended = await asyncio.to_thread(
        subprocess.run, command, env=environment, cwd=folder, capture_output=True, text=True, timeout=200
    )
    assert ended.returncode == 0, ended.stderr
    assert "DEPRECATED" not in ended.stderr
    return ended.stdout.splitlines()


async def test_the_program_of_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fakes, "VOCABULARY_SIZE", 1280)
    async with running(Stand(tmp_path / "gateway"), model=str(fovea_tinyvlm.ensure())) as stand:
        lines = await _run(programs("rollout.md")[0], stand, tmp_path)
        async with stand.http() as http:
            (run,) = (await http.get("training_runs")).json()["training_runs"]
            curves = (await http.get(f"live/curves/{run['training_run_id']}")).json()["curves"]
    assert curves["reward"]["step"] == [1, 2], "rewards are on the live page of the server that connect() names"
    assert [line.partition(":")[0] for line in lines] == ["step 1", "step 2"], "expected one line for each step"


async def test_its_warm_up_and_its_resumed_run_go_on_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other blocks replace its training and use its names, with few episodes and steps."""
    monkeypatch.setattr(fakes, "VOCABULARY_SIZE", 1280)
    first, *others = programs("rollout.md")
    assert len(others) == 2
    blocks = "\n".join(others).replace("sources * 256", "sources * 2")
    lines = blocks.replace("WarmUpSettings(", "WarmUpSettings(steps=2, ").splitlines(keepends=True)
    imports = "".join(line for line in lines if line.startswith("from "))
    names = "held_out, model = sources, served.supported_models[0].model_name\n"
    body = names + "".join(line for line in lines if not line.startswith("from "))
    program, count = re.subn(r"    policy = await train\(.*\n", lambda _: textwrap.indent(body, "    "), first)
    assert count == 1
    async with running(Stand(tmp_path / "gateway"), model=str(fovea_tinyvlm.ensure())) as stand:
        said = await _run(imports + program, stand, tmp_path)
    assert [line.partition(":")[0] for line in said if line.startswith("step")] == ["step 1", "step 2"]
    assert (tmp_path / "walker").is_dir(), "what a later start resumes from"
