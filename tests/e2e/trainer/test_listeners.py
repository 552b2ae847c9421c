"""A trainer alone listens where it was told to, and nowhere else."""

import psutil

from tests.e2e.trainer.conftest import Bench
from tests.listeners import listeners, unasked


async def test_a_trainer_listens_where_it_was_told_to(qwen3: Bench) -> None:
    launcher = psutil.Process(qwen3.process.process.pid)
    assert not listeners([launcher])
    everything = [launcher, *launcher.children(recursive=True)]
    assert qwen3.process.address in listeners(everything)
    assert not unasked(everything, {qwen3.process.address})
