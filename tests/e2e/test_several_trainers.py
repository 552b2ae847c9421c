"""Two real trainers behind one gateway: one is drained, killed or stopped while many clients train, and none notices.

Every loss equals that of an undisturbed run, bit for bit. Calls of several models therefore share no passes, because
the position of a call in a pass changes its last bits.
"""

import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import tinker
from tinker import types

import fovea_tinyvlm
from tests.e2e.stack import Stack, running_stack

CLIENTS = 8
TRAINERS = ("trainer", "trainer2")
STEPS = 40
"""Enough that `fovea drain`, which takes seconds to start, and the loss of a trainer fall within the training."""
pytestmark = pytest.mark.slow


def datum(client: int, step: int) -> types.Datum:
    """Returns a datum with tokens that depend on client and step."""
    tokens = [1 + (7 * client + 3 * step + position) % 90 for position in range(12)]
    inputs = {
        "target_tokens": types.TensorData(data=tokens[1:], dtype="int64", shape=[11]),
        "weights": types.TensorData(data=[1.0] * 11, dtype="float32", shape=[11]),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def train(
    service: tinker.ServiceClient, name: str, number: int, done: Callable[[int], None], steps: int = STEPS
) -> list[Any]:
    """Trains one model; returns the log-probabilities and metrics of all its commands."""
    training = service.create_lora_training_client(base_model=name, rank=4 + number % 3, seed=number).result()
    found: list[Any] = []
    for step in range(steps):
        loss = training.forward_backward([datum(number, step), datum(number + 1, step)], "cross_entropy")
        stepped = training.optim_step(types.AdamParams(learning_rate=1e-3))
        outputs = [output["logprobs"].data for output in loss.result().loss_fn_outputs]
        found.append((outputs, loss.result().metrics.get("loss:sum"), dict(stepped.result().metrics or {})))
        done(step)
    return found


def train_all(stack: Stack, disturb: Callable[[], None] | None = None, at: int = 8) -> list[list[Any]]:
    """Trains all clients concurrently. Calls `disturb` when half of them have made `at` steps."""
    counts, due = [0] * CLIENTS, threading.Event()

    def note(number: int, step: int) -> None:
        counts[number] = step
        if sum(count >= at for count in counts) >= CLIENTS // 2:
            due.set()

    def run(number: int) -> list[Any]:
        with stack.service_client() as service:
            return train(service, stack.model_name, number, lambda step: note(number, step))

    with ThreadPoolExecutor(CLIENTS) as threads:
        running = [threads.submit(run, number) for number in range(CLIENTS)]
        if disturb:
            assert due.wait(240)
            disturb()
        return [future.result() for future in running]


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """Two trainers of one rank each, without samplers."""
    with running_stack(fovea_tinyvlm.ensure(), "--trainers", "2", "--ranks", "1", "--samplers", "0") as stack:
        # The gateway serves once one trainer is up. It may connect to the other a second after that one is ready, and
        # models created in between would all go to the first.
        wait_until(lambda: all(f"trainer {stack.address(name)} is up" in stack.log.read_text() for name in TRAINERS))
        yield stack


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture(scope="module")
def undisturbed(stack: Stack) -> tuple[list[list[Any]], dict[str, int]]:
    """The losses of an undisturbed run, and the number of models that each trainer had meanwhile."""
    seen: dict[str, int] = {}
    losses = train_all(stack, lambda: seen.update(models_of(stack)))
    return losses, seen


@pytest.fixture(scope="module")
def expected(undisturbed: tuple[list[list[Any]], dict[str, int]]) -> list[list[Any]]:
    """The losses of an undisturbed run; every disturbed run must give the same."""
    return undisturbed[0]


def trainer_process(stack: Stack, name: str) -> psutil.Process:
    port = stack.address(name).rpartition(":")[2]
    for child in psutil.Process(stack.state["pid"]).children():
        words = child.cmdline()
        if "fovea_trainer" in words and words[words.index("--port") + 1] == port:
            return child
    raise AssertionError(f"there is no process of {name}")


def models_of(stack: Stack) -> dict[str, int]:
    """Returns the number of models in each trainer, from its metrics."""
    found = {}
    for name in TRAINERS:
        with urllib.request.urlopen(stack.state["services"][name]["metrics"]) as answer:
            lines = answer.read().decode().splitlines()
        found[name] = int(next(float(line.split()[-1]) for line in lines if line.startswith("fovea_trainer_models ")))
    return found


def drain(stack: Stack, address: str, *more: str) -> None:
    folder = stack.log.parent
    state_dir = next(path for path in folder.rglob("gateway.db")).parent
    command = [sys.executable, "-m", "fovea.cli.main", "drain", address, *more, "--state-dir", str(state_dir)]
    subprocess.run(command, check=True)


def test_both_trainers_are_used(undisturbed: tuple[list[list[Any]], dict[str, int]]) -> None:
    assert undisturbed[1] == {"trainer": CLIENTS // 2, "trainer2": CLIENTS // 2}


def test_a_drained_trainer_hands_its_models_over(stack: Stack, expected: list[list[Any]]) -> None:
    assert train_all(stack, lambda: drain(stack, stack.address("trainer"))) == expected
    log = stack.log.read_text()
    assert log.count(f"moves from {stack.address('trainer')} to {stack.address('trainer2')}") >= CLIENTS // 2
    assert models_of(stack)["trainer"] == 0
    drain(stack, stack.address("trainer"), "--undo")
    time.sleep(2)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_lost_trainer_hands_its_models_over(stack: Stack, expected: list[list[Any]], number: int) -> None:
    assert train_all(stack, lambda: trainer_process(stack, "trainer2").send_signal(number)) == expected
    assert "gave another answer when it ran again" not in stack.log.read_text()
