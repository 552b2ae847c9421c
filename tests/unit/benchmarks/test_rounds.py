"""Aggregation of rounds into figures."""

import asyncio
import os
import time

import pytest

from benchmarks import sampler, tenants
from benchmarks.running import Running, busy
from benchmarks.sampler_ways import Timing


class Counting:
    """A workload that counts the samples in progress."""

    name = "counting"

    def __init__(self) -> None:
        self.now = self.most = 0

    async def prepare(self, inputs: list[int]) -> list[int]:
        return inputs

    async def sample(self, prepared: int) -> Timing:
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0)
        self.now -= 1
        return Timing(0.0, 0.0, prepared)

    async def close(self) -> None: ...


async def test_each_prompt_is_sampled_once_with_so_many_in_flight() -> None:
    way = Counting()
    timings, seconds = await sampler.drive(way, list(range(20)), 4)
    assert sorted(one.token_count for one in timings) == list(range(20))
    assert way.most == 4
    assert seconds > 0


def test_a_round_of_samples() -> None:
    rounds = sampler.Rounds()
    rounds.add([Timing(0.25, 1.0, 10), Timing(0.75, 3.0, 10)], 4.0, {})
    assert rounds.token_rates == [5.0]
    assert (rounds.latency(0.5), rounds.latency(1.0), rounds.first_token()) == ([2.0], [3.0], [0.5])


def test_a_round_of_tenants() -> None:
    rounds = tenants.Rounds()
    rounds.add([[1.0, 1.0], [1.0, 3.0]], 16, 3.0, {})
    assert rounds.datum_rates == [16.0]  # four steps in four seconds
    assert rounds.unfairness == [2.0]
    assert rounds.steps == [1.0]
    assert rounds.busy_shares == [0.75]


def test_busy_cores_are_medians_without_idle_processes() -> None:
    rounds = [{"gateway": 0.5, "trainer": 0.0}, {"gateway": 0.7, "trainer": 0.0}, {"gateway": 0.6, "trainer": 0.9}]
    assert busy(rounds) == {"gateway": 0.6}


def test_cores_of_a_busy_process() -> None:
    running = Running("", "", "", {}, {"this": os.getpid()}, {}, "")
    with running.cores() as cores:
        begun = time.process_time()
        while time.process_time() < begun + 0.5:
            pass
    # Both read this process one after the other; the kernel counts ticks of 10 ms.
    assert cores["this"] == pytest.approx(cores["client"], rel=0.1)
    assert cores["this"] > 0
