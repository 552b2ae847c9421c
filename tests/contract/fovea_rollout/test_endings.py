"""A user's program ends in one line after Ctrl-C, and with a last line about a wrong API key, which says what to do."""

import asyncio
import re
import signal
import sys
from pathlib import Path

import pytest

import fovea_tinyvlm
from tests.client_environment import client_environment
from tests.contract.gateway import fakes
from tests.contract.gateway.conftest import KEY, Stand, running

TRAINING = """
import sys
from fovea_rollout import ChatTemplate, LoopSettings, Step, connect, resumed_training_client, run, train

class Colour:
    def reset(self):
        return [{"role": "user", "content": "Red or blue?"}]

    def step(self, answer):
        return Step(reward=float(len(answer.text) % 2), is_done=True)

    def close(self):
        pass

async def main(url, key):
    service = connect(url, key)
    training = await resumed_training_client(service, "run")
    training = training or await service.create_lora_training_client(base_model=sys.argv[3])
    settings = LoopSettings(60, 1, 2, learning_rate=1e-4, kl_coefficient=0.0, substeps=1, evaluate_every=2,
                            loss="importance_sampling")
    template = ChatTemplate(training.get_tokenizer())
    await train(training, template, [Colour], settings, lambda report: print(report.step + 1, flush=True), out="run")

run(main(*sys.argv[1:3]))
"""
WARMING = TRAINING.replace("def reset(self):", "def reset(self):\n        print(0, flush=True)").replace(
    "    await train(",
    """
    from fovea_rollout import ScriptedPlayer, TinkerPolicy, WarmUpSettings, warm_up
    policy = TinkerPolicy(await training.save_weights_and_get_sampling_client())
    player = ScriptedPlayer(policy, training.get_tokenizer(), lambda prompt: "red")
    await warm_up(training, template, [Colour] * 16, player, WarmUpSettings(steps=10**6))
    await train(""",
)
BEFORE = """
import asyncio
from fovea_rollout import run

async def main():
    print(0, flush=True)
    await asyncio.sleep(600)

run(main())
"""
TUNING = """
import sys
from fovea_data import fine_tune, load_chats
fine_tune(load_chats([{"prompt": "Is it?", "completion": "yes"}]), out="run", base_url=sys.argv[1], api_key=sys.argv[2])
"""


async def begin(folder: Path, program: str, stand: Stand, key: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stand.url, key, fakes.MODEL, cwd=folder,
        env=client_environment(TINKER_TELEMETRY="0"),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def step_of(process: asyncio.subprocess.Process) -> int:
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), 100)
    assert line, (await process.communicate())[1].decode()
    return int(line)


async def test_a_loop_names_the_step_from_which_it_resumes_and_a_wrong_key_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fakes, "VOCABULARY_SIZE", 1280)
    async with running(Stand(tmp_path / "gateway"), model=str(fovea_tinyvlm.ensure())) as stand:
        training = await begin(tmp_path, TRAINING, stand, KEY)
        wrong = [await begin(tmp_path, program, stand, "tml-wrong") for program in (TRAINING, TUNING)]
        while await step_of(training) < 5:
            pass
        training.send_signal(signal.SIGINT)
        _, told = await asyncio.wait_for(training.communicate(), 60)
        *progress, line = told.decode().splitlines()
        assert all(
            re.match(r"http.* answers; loading the Tinker SDK$|steps \d|rollouts \d", one) for one in progress
        ), told
        found = re.fullmatch(r"stopped: .* out='run' and the client from .* to resume after step (\d+)", line)
        assert found is not None, line
        assert training.returncode == 1
        again = await begin(tmp_path, TRAINING, stand, KEY)
        assert await step_of(again) == int(found[1]) + 1
        again.kill()
        await again.communicate()
        for one in wrong:
            said, told = await asyncio.wait_for(one.communicate(), 60)
            assert (one.returncode, said) == (1, b"")
            line = told.decode().splitlines()[-1].removeprefix("fovea.client.gateway.NotConnected: ")
            assert line.startswith(f"the server at {stand.url} refuses the API key (TINKER_API_KEY, api_key or --api-")
            assert "`fovea keys create` makes one" in line


async def test_a_program_that_has_not_begun_to_train_ends_in_one_line(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", BEFORE, cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    await step_of(process)
    process.send_signal(signal.SIGINT)
    _, told = await asyncio.wait_for(process.communicate(), 60)
    assert (process.returncode, told) == (1, b"stopped by Ctrl-C\n")


async def test_a_warm_up_says_that_it_begins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fakes, "VOCABULARY_SIZE", 1280)
    async with running(Stand(tmp_path / "gateway"), model=str(fovea_tinyvlm.ensure())) as stand:
        warming = await begin(tmp_path, WARMING, stand, KEY)
        await step_of(warming)
        warming.send_signal(signal.SIGINT)
        _, told = await asyncio.wait_for(warming.communicate(), 60)
    *progress, line = told.decode().splitlines()
    assert progress in ([], [f"{stand.url} answers; loading the Tinker SDK"])
    assert line == "stopped: a warm-up saves nothing, so the next one begins again"
    assert warming.returncode == 1
