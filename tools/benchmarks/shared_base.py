"""Turns of LoRA RL with one copy of the base and with two: `python -m benchmarks.shared_base MODEL --gpus 0`.

Each way starts `fovea up` on one GPU or CPU. A turn is a rollout, a step on its answers (`importance_sampling`, the
reward is the share of even tokens), a push, and the first token of the new adapter. The program prints the seconds of
each part, the memory of each service after the start and after each turn, and the difference of sampler and trainer
log-probabilities before the first step and after the last push. Each figure is printed as soon as it is known.

Memory is on a CPU the proportional set size, in which a page that several processes map counts in equal parts; on a GPU
what the driver reports. Way `shared` starts with `--shared-base`, `own` without. `--set` and environment variables go
to `fovea up`.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tinker

from benchmarks.agreement import Drawn, kl, score
from benchmarks.client import Bench
from benchmarks.figure import emit
from fovea_demo.up import NotReady, running_fovea

_WAYS = {"shared": ["--shared-base"], "own": []}
_GROUP = 8
"""Answers to one prompt; their mean reward is the baseline."""
_MIB = 2**20


@dataclass(frozen=True)
class Turns:
    """The turns of one running Fovea, and the sizes that its figures name."""

    bench: Bench
    training: tinker.TrainingClient
    options: argparse.Namespace
    sizes: dict[str, Any]

    def run(self, note_memory: Callable[[str], None]) -> None:
        """Takes all turns and prints their figures."""
        sampler = self._pushed(0)
        for turn in range(self.options.turns):
            drawn = self._rollout(sampler, turn)
            if turn == 0:
                self._compare(drawn, "before")
            self._timed("step", turn, partial(self._step, drawn))
            sampler = self._pushed(turn + 1)
            note_memory(f"turn {turn}")
        self._compare(self._rollout(sampler, self.options.turns), "after")

    def _timed(self, part: str, turn: int, work: Callable[[], Any]) -> tuple[Any, float]:
        began = time.perf_counter()
        found = work()
        seconds = time.perf_counter() - began
        emit(f"shared_base.{part}_s", [seconds], "s", turn=turn, **self.sizes)
        return found, seconds

    def _pushed(self, turn: int) -> Any:
        sampler, _ = self._timed("push", turn, self._push)
        prompt, one = self.bench.prompt(np.random.default_rng(turn), 16), tinker.SamplingParams(max_tokens=1)
        self._timed("first_token", turn, lambda: sampler.sample(prompt, 1, one).result(600))
        return sampler

    def _push(self) -> Any:
        return self.training.save_weights_and_get_sampling_client().result(600)

    def _rollout(self, sampler: Any, turn: int) -> list[Drawn]:
        """Returns all answers, which have the same length."""
        options, rng = self.options, np.random.default_rng(100 + turn)
        params = tinker.SamplingParams(max_tokens=options.new_tokens, temperature=1.0, seed=turn, stop=[])
        length = options.tokens // options.answers - options.new_tokens + 1
        prompts = [self.bench.prompt(rng, length) for _ in range(options.answers // _GROUP)]

        def sample() -> list[Drawn]:
            futures = [sampler.sample(prompt, _GROUP, params) for prompt in prompts]
            return [
                Drawn(prompt, list(one.tokens), np.asarray(one.logprobs, np.float64), 1.0)
                for prompt, future in zip(prompts, futures, strict=True)
                for one in future.result(600).sequences
            ]

        drawn: list[Drawn]
        drawn, seconds = self._timed("rollout", turn, sample)
        count = sum(len(one.tokens) for one in drawn)
        emit("shared_base.rollout_rate", [count / seconds], "token/s", turn=turn, tokens=count, **self.sizes)
        return drawn

    def _step(self, drawn: list[Drawn]) -> None:
        rewards = [float(np.mean(np.asarray(one.tokens) % 2 == 0)) for one in drawn]
        data = []
        for index, one in enumerate(drawn):
            group = index - index % _GROUP
            advantage = rewards[index] - statistics.mean(rewards[group : group + _GROUP])
            data.append(_policy_datum(one, advantage))
        backward = self.training.forward_backward(data, "importance_sampling")
        self.training.optim_step(tinker.AdamParams(learning_rate=self.options.rate)).result(600)
        backward.result(600)

    def _compare(self, drawn: list[Drawn], when: str) -> None:
        (found,) = score(self.training, drawn, (), ["packed"])
        sizes = np.abs(found.differences)
        facts: dict[str, Any] = {"mean": float(sizes.mean()), "largest": float(sizes.max()), "tokens": len(sizes)}
        facts["half_mean_square"] = float(np.mean(sizes**2)) / 2
        emit(f"shared_base.kl.{when}", [kl(found.differences)], "nat", **facts, **self.sizes)


def _policy_datum(drawn: Drawn, advantage: float) -> tinker.Datum:
    prompt = drawn.prompt.to_ints()
    before = [0.0] * (len(prompt) - 1)
    inputs = {"logprobs": [*before, *drawn.logprobs], "advantages": [*before, *([advantage] * len(drawn.tokens))]}
    targets = tinker.TensorData(data=[*prompt[1:], *drawn.tokens], dtype="int64")
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints([*prompt, *drawn.tokens[:-1]]),
        loss_fn_inputs={"target_tokens": targets}
        | {name: tinker.TensorData(data=values, dtype="float32") for name, values in inputs.items()},
    )


def measure(options: argparse.Namespace, way: str) -> None:
    """Starts a Fovea, takes the turns, and prints the figures. Raises NotReady if it does not start."""
    settings = [word for text in options.set for word in ("--set", text)]
    ready = ("--ready-timeout-s", str(options.ready_s))
    layout = ("--gpus", options.gpus, "--ranks", "1", "--port", "0", "--grpc-port", "0", *ready, *settings)
    sizes = {"model": options.model.name, "way": way, "rank": options.rank, "answers": options.answers}
    sizes |= {"new_tokens": options.new_tokens, "step_tokens": options.tokens}
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        if options.logs:
            options.logs.mkdir(parents=True, exist_ok=True)
            (Path(folder) / "up.log").symlink_to(options.logs.resolve() / f"{options.model.name}-{way}.log")
        running = running_fovea(Path(folder), options.model, *layout, *_WAYS[way], timeout_s=options.ready_s)
        state = stack.enter_context(running)
        emit("shared_base.ready_s", [time.perf_counter() - began], "s", layout=_layout(Path(folder)), **sizes)

        def note_memory(at: str) -> None:
            for service, used in _memory_mib(state, options.gpus).items():
                emit("shared_base.memory_mib", [used], "MiB", service=service, at=at, **sizes)

        note_memory("ready")
        with Bench.open(state["base_url"]) as bench:
            Turns(bench, bench.training(options.rank), options, sizes).run(note_memory)


def _layout(folder: Path) -> str:
    """Returns the line in which `fovea up` tells how it has divided the device."""
    lines = (folder / "up.log").read_text().splitlines()
    return next((line.strip() for line in lines if " share GPU " in line or "no GPU:" in line), "")


def _memory_mib(state: dict[str, Any], gpu: str) -> dict[str, float]:
    """Returns the memory of each service; on a GPU also what the driver reports for all processes.

    In some containers the driver knows no process. Then only the sum is returned.
    """
    processes = {service: _processes(state, service) for service in ("sampler", "trainer")}
    if gpu == "none":
        pss = {name: [float(one.memory_full_info().pss) for one in each] for name, each in processes.items()}
        return {name: sum(each) / _MIB for name, each in pss.items()}
    used = dict(line.split(", ") for line in _driver(gpu, "--query-compute-apps=pid,used_memory"))
    known = {name: [used[str(one.pid)] for one in each if str(one.pid) in used] for name, each in processes.items()}
    found = {name: sum(map(float, each)) for name, each in known.items() if each and all(map(str.isdigit, each))}
    return found | {"gpu": float(_driver(gpu, "--query-gpu=memory.used")[0])}


def _processes(state: dict[str, Any], service: str) -> list[psutil.Process]:
    own = psutil.Process(state["services"][service]["pid"])
    return [own, *own.children(recursive=True)]


def _driver(gpu: str, query: str) -> list[str]:
    command = ["nvidia-smi", "-i", gpu, query, "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def main() -> None:
    """Measures each way; one that does not start, such as two copies of a large model, leaves the others."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.shared_base", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--gpus", default="none")
    parser.add_argument("--ways", nargs="+", choices=_WAYS, default=[*_WAYS])
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--answers", type=int, default=64, help=f"answers of a rollout, {_GROUP} to each prompt")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of a step, over all answers")
    parser.add_argument("--rate", type=float, default=1e-4, help="learning rate")
    parser.add_argument("--ready-s", type=float, default=300.0, help="seconds until all services must be ready")
    parser.add_argument("--logs", type=Path, help="folder for the log of each way, which is dropped otherwise")
    parser.add_argument("--set", action="append", default=[], metavar="SERVICE.NAME=VALUE", help="as of `fovea up`")
    options = parser.parse_args()
    for way in options.ways:
        try:
            measure(options, way)
        except NotReady as error:
            print(f"{way}: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
