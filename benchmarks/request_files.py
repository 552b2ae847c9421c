"""The gateway's files that one request enters. `python -m benchmarks.request_files [--list]`.

A real gateway before the fake services of the contract tests, and the real SDK. A file counts if one of its functions
runs, in whatever thread, between the call of the SDK and its result, in each of several repeats: so what the gateway
does beside requests is not counted.
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

import gateway
from benchmarks.figure import emit

_FOLDER = f"{Path(gateway.__file__).parent}/"
_PROMPT = types.ModelInput.from_ints([1, 2, 3])
_SAMPLING = types.SamplingParams(max_tokens=4, seed=1)
Functions = set[tuple[str, str]]
"""(file, qualified name) of each."""


class Walk:
    """Notes the gateway's functions that run while it is open. To be made before the threads that it shall see."""

    def __init__(self) -> None:
        self._functions: Functions | None = None
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def of(self, request: Callable[[], Any]) -> Functions:
        """What runs until `request` returns."""
        seen: Functions = set()
        self._functions = seen
        request()
        self._functions = None
        return seen

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        code, functions = frame.f_code, self._functions
        if functions is not None and event == "call" and code.co_filename.startswith(_FOLDER):
            functions.add((code.co_filename.removeprefix(_FOLDER), code.co_qualname))


def requests(client: tinker.ServiceClient, model: str) -> dict[str, Callable[[], Any]]:
    """The requests by name, each from its call to its result, on a training client and a sampling client."""
    from tests.contract.gateway.requests import image_datum

    training = client.create_lora_training_client(base_model=model, rank=8).result()
    sampling = client.create_sampling_client(base_model=model).result()

    def save_and_sample() -> None:
        saved = training.save_weights_and_get_sampling_client().result()
        saved.sample(_PROMPT, num_samples=1, sampling_params=_SAMPLING).result()

    return {
        "forward_backward": lambda: training.forward_backward([image_datum()], "cross_entropy").result(),
        "sample": lambda: sampling.sample(_PROMPT, num_samples=1, sampling_params=_SAMPLING).result(),
        "optim_step": lambda: training.optim_step(types.AdamParams(learning_rate=1e-3)).result(),
        "save_and_first_sample": save_and_sample,
    }


async def walk(repeats: int) -> dict[str, Functions]:
    """The functions that each request enters in all repeats."""
    from tests.contract.gateway.conftest import Stand, running
    from tests.contract.gateway.fakes import MODEL

    watch = Walk()

    def use(client: tinker.ServiceClient) -> dict[str, Functions]:
        by_name = requests(client, MODEL)
        rounds = [{name: watch.of(request) for name, request in by_name.items()} for _ in range(repeats)]
        return {name: set.intersection(*(one[name] for one in rounds)) for name in by_name}

    with tempfile.TemporaryDirectory() as folder:
        async with running(Stand(Path(folder))) as stand:
            found: dict[str, Functions] = await stand.sdk(use)
            return found


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--revision", help="What to call it; an old one is measured by PYTHONPATH in its checkout.")
    parser.add_argument("--list", action="store_true", help="Print the files.")
    options = parser.parse_args()
    for name, functions in asyncio.run(walk(options.repeats)).items():
        files = sorted({file for file, _ in functions})
        emit(f"request_files.{name}", [len(files)], "files", functions=len(functions), revision=options.revision)
        if options.list:
            print("".join(f"    {file}\n" for file in files), end="")


if __name__ == "__main__":
    main()
