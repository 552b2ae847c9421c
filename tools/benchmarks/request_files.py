"""Counts the gateway's files that one request enters: `python -m benchmarks.request_files [--list]`.

Uses a real gateway with the fake services of the contract tests, and the real SDK. A file counts if one of its
functions runs, in any thread, between the call of the SDK and its result, in each of several repeats. This excludes the
gateway's background work. Each request has a gateway of its own with one client: a sampling client would keep a poll
open, and the files of polls are not part of an `optim_step`.
"""

import argparse
import asyncio
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import tinker
from tinker import types

import fovea_gateway
from benchmarks.figure import emit

_FOLDER = f"{Path(fovea_gateway.__file__).parent}/"
_PROMPT = types.ModelInput.from_ints([1, 2, 3])
_SAMPLING = types.SamplingParams(max_tokens=4, seed=1)
Request = Callable[[], Any]
Functions = set[tuple[str, str]]
"""(file, qualified name) of each function."""


class Walk:
    """Records the gateway's functions that run while it is open. Must be created before the threads that it should
    observe.
    """

    def __init__(self) -> None:
        self._functions: Functions | None = None
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def of(self, request: Request) -> Functions:
        """Returns the functions that run until `request` returns."""
        seen: Functions = set()
        self._functions = seen
        request()
        self._functions = None
        return seen

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        code, functions = frame.f_code, self._functions
        if functions is not None and event == "call" and code.co_filename.startswith(_FOLDER):
            functions.add((code.co_filename.removeprefix(_FOLDER), code.co_qualname))


def _forward_backward(client: tinker.ServiceClient, model: str) -> Request:
    from tests.contract.gateway.requests import image_datum

    training = client.create_lora_training_client(base_model=model, rank=8).result()
    return lambda: training.forward_backward([image_datum()], "cross_entropy").result()


def _sample(client: tinker.ServiceClient, model: str) -> Request:
    sampling = client.create_sampling_client(base_model=model).result()
    return lambda: sampling.sample(_PROMPT, num_samples=1, sampling_params=_SAMPLING).result()


def _optim_step(client: tinker.ServiceClient, model: str) -> Request:
    training = client.create_lora_training_client(base_model=model, rank=8).result()
    return lambda: training.optim_step(types.AdamParams(learning_rate=1e-3)).result()


def _save_and_first_sample(client: tinker.ServiceClient, model: str) -> Request:
    training = client.create_lora_training_client(base_model=model, rank=8).result()

    def save_and_sample() -> None:
        saved = training.save_weights_and_get_sampling_client().result()
        saved.sample(_PROMPT, num_samples=1, sampling_params=_SAMPLING).result()

    return save_and_sample


REQUESTS: dict[str, Callable[[tinker.ServiceClient, str], Request]] = {
    "forward_backward": _forward_backward,
    "sample": _sample,
    "optim_step": _optim_step,
    "save_and_first_sample": _save_and_first_sample,
}
"""A function per request that first creates the request's only client and then sends the request."""


async def walk(repeats: int) -> dict[str, Functions]:
    """Returns the functions that each request enters in all repeats."""
    from tests.contract.gateway.conftest import Stand, running
    from tests.contract.gateway.fakes import MODEL

    watch, found = Walk(), {}
    for name, prepare in REQUESTS.items():

        def use(client: tinker.ServiceClient, prepare: Any = prepare) -> Functions:
            request = prepare(client, MODEL)
            return set.intersection(*(watch.of(request) for _ in range(repeats)))

        with tempfile.TemporaryDirectory() as folder:
            async with running(Stand(Path(folder))) as stand:
                found[name] = await stand.sdk(use)
    return found


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument(
        "--revision", help="Name of the revision in the output; to measure an old one, set PYTHONPATH to its checkout."
    )
    parser.add_argument("--list", action="store_true", help="Print the files.")
    options = parser.parse_args()
    for name, functions in asyncio.run(walk(options.repeats)).items():
        files = sorted({file for file, _ in functions})
        emit(f"request_files.{name}", [len(files)], "files", functions=len(functions), revision=options.revision)
        if options.list:
            print("".join(f"    {file}\n" for file in files), end="")


if __name__ == "__main__":
    main()
