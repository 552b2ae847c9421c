"""The process that evaluates traced losses: it is killed above its limits, and the next call gets a new one."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from fovea.api.v1 import trainer_pb2
from fovea.wire import custom_loss
from fovea.wire.errors import InvalidInput
from fovea_trainer.losses import Loss, LossValue, Sandbox, loss_of
from fovea_trainer.losses.frames import Answer, Failure, FrameError, Request, read_answer
from tests.processes import is_gone
from tests.unit.trainer.losses.traced import graph, node, ref, square_loss

X = ref("logprobs")
SLOW = graph(
    node("call_method", "wide", "repeat", X, 2**20),
    *(node("call_method", f"m{i}", "lgamma", ref("wide")) for i in range(4)),
    node("call_method", "total", "sum", X),
)
"""About 0.1 s per datum."""

WIDE = graph(
    node("call_method", "wide", "repeat", X, 2**20),
    node("call_method", "exp", "exp", ref("wide")),
    *(node("call_function", f"a{i}", "torch.add", ref("exp"), i) for i in range(4)),
    node("call_method", "total", "sum", ref("exp")),
)
"""16 MiB per node."""


def small(value: float = -1.0) -> torch.Tensor:
    return torch.full((4,), value, requires_grad=True)


def custom(message: trainer_pb2.CustomLoss, sandbox: Sandbox) -> Loss:
    return loss_of(trainer_pb2.ForwardBackwardHeader(loss_function="custom", custom_loss=message), sandbox)


def each(loss: Loss, rows: list[torch.Tensor]) -> list[LossValue]:
    return loss.compute_each(range(10, 10 + len(rows)), rows, [{}] * len(rows))


def assert_it_goes_on(sandbox: Sandbox) -> None:
    assert [value.loss.item() for value in each(custom(square_loss(), sandbox), [small(), small(-2.0)])] == [4, 16]


def worker_of(sandbox: Sandbox) -> psutil.Process:
    """Returns the process that runs a graph: the only child of the forking process, which has the limits as last
    arguments.
    """
    commands = {one: one.cmdline() for one in psutil.Process().children() if not is_gone(one)}
    (parent,) = [
        one
        for one, command in commands.items()
        if "fovea_trainer.losses.loss_worker" in command and command[-2] == str(sandbox.memory_mib)
    ]
    (found,) = parent.children()
    return found


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    made = Sandbox(timeout_s=60.0, memory_mib=64)
    yield made
    made.close()


def test_time_is_that_of_the_whole_call(roomy: Sandbox) -> None:
    """Including calls with several micro-batches; the next call gets a worker."""
    loss = custom(SLOW, roomy)
    loss.limit_time(2.0)
    words = r"^datum\[\d+\] custom loss 'by_hand': node '\w+' \(\w+\) was stopped: .* may take 60 s in total"
    with pytest.raises(InvalidInput, match=words) as caught:
        each(loss, [small()] * 60)
    assert caught.value.field
    assert loss.seconds_left == 0
    assert_it_goes_on(roomy)
    with pytest.raises(InvalidInput, match="was stopped"):
        each(loss, [small()])
    fresh = custom(square_loss(), roomy)
    each(fresh, [small()])
    assert fresh.seconds_left is not None
    assert 0 < fresh.seconds_left < 60
    assert_it_goes_on(roomy)


def test_memory_is_refused_by_name(sandbox: Sandbox) -> None:
    with pytest.raises(InvalidInput, match=r"datum\[10\] .* node 'a\d' \(torch.add\) failed: .* more than 64 MiB"):
        each(custom(WIDE, sandbox), [small()])
    assert_it_goes_on(sandbox)


def test_a_request_too_large_for_the_worker_is_refused(sandbox: Sandbox) -> None:
    with pytest.raises(InvalidInput, match="ended its process: a loss may use 64 MiB"):
        each(custom(square_loss(), sandbox), [torch.zeros(2**25, requires_grad=True)])
    assert_it_goes_on(sandbox)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["worker", "its parent"])
def test_a_worker_killed_from_outside_costs_nothing(sandbox: Sandbox, which: str) -> None:
    assert_it_goes_on(sandbox)
    worker = worker_of(sandbox)
    parent = worker.parent()
    assert parent is not None
    ended = worker if which == "worker" else parent
    ended.send_signal(signal.SIGKILL)
    psutil.wait_procs([ended], timeout=30)
    assert_it_goes_on(sandbox)
    assert worker_of(sandbox).pid != worker.pid


def test_a_worker_holds_nothing_of_ours(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no environment variables, no files except its link, and no signals that are meant for the rank."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with Path(__file__).open() as _:
        assert_it_goes_on(sandbox)
    worker = worker_of(sandbox)
    assert "AWS_SECRET_ACCESS_KEY" not in worker.environ()
    files = [os.readlink(f"/proc/{worker.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{worker.pid}/fd")]
    assert sorted(name.partition(":")[0] for name in files) == ["/dev/null"] * 3 + ["/memfd", "socket"]
    for process in (worker.parent(), worker):
        assert process is not None
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
    assert_it_goes_on(sandbox)
    assert worker_of(sandbox).pid == worker.pid


@pytest.mark.slow
def test_it_ends_with_its_rank() -> None:
    program = (
        "import sys; from tests.unit.trainer.losses import test_sandbox as t\n"
        "box = t.Sandbox(5, 64); t.assert_it_goes_on(box); worker = t.worker_of(box)\n"
        "print(worker.pid, worker.ppid(), flush=True); sys.stdin.read()"
    )
    rank = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert rank.stdout is not None
    processes = [psutil.Process(int(pid)) for pid in rank.stdout.readline().split()]
    assert len(processes) == 2
    rank.kill()
    rank.communicate()
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert not alive


ANSWERS: dict[str, bytes] = {
    "a place beyond": (5).to_bytes(8, "little") + bytes(8),
    "a place before": (-2).to_bytes(8, "little", signed=True) + bytes(8),
    "a long message": bytes(8) + (10**12).to_bytes(8, "little"),
    "a gradient": b"\xff" * 8 + bytes(8) + bytes(8 * 2 + 4 * 2) + b"\xff" * (4 * 8),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_an_answer_is_not_trusted(case: str) -> None:
    """The request bounds the size of the answer."""
    asked = Request(b"", [[torch.zeros(4)], [torch.zeros(4)]], metric_count=1, backward=True)
    with pytest.raises(FrameError):
        read_answer(_from(ANSWERS[case]), asked)


def test_text_of_an_answer_is_printable() -> None:
    asked = Request(b"", [[torch.zeros(4)]], metric_count=0, backward=True)
    text = b"a\n\x1b[31m\xff\xc2\xa0"
    failure = read_answer(_from(bytes(8) + len(text).to_bytes(8, "little") + text), asked)
    assert isinstance(failure, Failure)
    assert failure.message.isprintable()
    assert isinstance(read_answer(_from(b"\xff" * 8 + bytes(8) + bytes(4 + 16)), asked), Answer)


def _from(data: bytes) -> Any:
    rest = bytearray(data)

    def read(size: int) -> bytearray:
        assert size <= len(rest), "asks for more than there should be"
        taken = rest[:size]
        del rest[:size]
        return taken

    return read


def _any_argument(draw: random.Random, depth: int = 0) -> Any:
    """Draws an argument that is small on the wire but may expand."""
    number = draw.choice([0, 1, -1, 2, 7, 10**3, 10**6, 10**9, 10**12, 2**62, 0.5, -1e300])
    simple = [number, X, ref("wide"), ref("rows"), ref("picks"), ref("mask"), ref("one"), None, True, "sum"]
    if depth < 2 and draw.random() < 0.3:
        items = [_any_argument(draw, depth + 1)] * draw.choice([1, 2, 3, 500])
        return draw.choice([items, {"tuple": items}, {"slice": (items * 3)[:3]}])
    return draw.choice(simple)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_no_operation_takes_memory_before_it_is_refused(roomy: Sandbox, seed: int) -> None:
    """For any arguments, the rules of costs.py refuse an operation long before the limits of the process."""
    draw = random.Random(seed)
    begin = [
        node("call_method", "wide", "repeat", X, 2**18),
        node("call_method", "rows", "reshape", ref("wide"), 2**10, 2**10),
        node("call_method", "picks", "new_zeros", X, 2**16, dtype={"dtype": "int64"}),
        node("call_function", "mask", "operator.gt", ref("wide"), -5),
        node("call_function", "one", "operator.getitem", X, 0),
    ]
    targets = [("call_function", one) for one in sorted(custom_loss.FUNCTIONS - {"getattr"})]
    targets += [("call_method", one) for one in sorted(custom_loss.METHODS)]
    done = 0
    for op, target in draw.sample(targets, 80):
        args = [_any_argument(draw) for _ in range(draw.choice([1, 1, 2, 3]))]
        args = [ref(draw.choice(["logprobs", "wide", "rows", "one"])), *args] if draw.random() < 0.8 else args
        message = graph(*begin, node(op, "it", target, *args), node("call_method", "total", "sum", X))
        try:
            each(custom(message, roomy), [small()])
            done += 1
        except InvalidInput as error:
            assert "MiB" not in error.message, (target, args)  # noqa: PT017 - most are refused, with reason
    assert done
