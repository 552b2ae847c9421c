"""Runs recipes in all environments against one server."""

import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cookbook import sandbox
from cookbook.environments import Environment
from cookbook.recipe import Recipe, Situation
from cookbook.recipes import RECIPES
from cookbook.running import Result, Run
from cookbook.workplace import lay_out

# A name from the cookbook's catalogue, by which recipes look up their renderer.
CATALOGUE_NAME = "Qwen/Qwen3-VL-30B-A3B-Instruct"
RENDERER_NAME = "qwen3_vl_instruct"
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Server:
    """A Tinker server.

    Attributes:
        base_url: URL of its REST API.
        api_key: An accepted API key.
        model_name: Its model.
        tokenizer: Folder of the model's tokenizer; None if the model's name is a folder.
    """

    base_url: str
    api_key: str
    model_name: str
    tokenizer: Path | None


class UnknownRecipe(ValueError):
    """The recipe does not exist. The message lists existing ones."""


def select(names: Sequence[str]) -> list[Recipe]:
    """Returns the named recipes, and those that provide their start checkpoints, in order; all recipes for no names."""
    by_name = {recipe.name: recipe for recipe in RECIPES}
    if unknown := sorted(set(names) - set(by_name)):
        raise UnknownRecipe(f"unknown recipe {', '.join(unknown)}; choose from {', '.join(by_name)}")
    wanted = set(names) or set(by_name)
    wanted |= {after for name in wanted if (after := by_name[name].after)}
    return [recipe for recipe in RECIPES if recipe.name in wanted]


class Suite:
    """Recipes against one server: in sequence within each environment, with environments in parallel.

    Args:
        recipes: Recipes, each after the one that provides its start checkpoint.
        server: A running server.
        work: Folder in which one subfolder per version is created anew.
        timeout_s: Timeout of one recipe in seconds.
        report: Called with every result, from several threads.
        progress: Called with the version and its current work, from several threads.
        seed: Seed of the datasets.
        problems: Number of maths problems to train on.
    """

    def __init__(
        self,
        recipes: Sequence[Recipe],
        server: Server,
        work: Path,
        timeout_s: float,
        report: Callable[[Result], None],
        progress: Callable[[str, str], None],
        seed: int = 0,
        problems: int = 256,
    ) -> None:
        self._recipes = recipes
        self._server = server
        self._work = work
        self._timeout_s = timeout_s
        self._report = report
        self._progress = progress
        self._seed, self._problems = seed, problems
        self._stopped = threading.Event()

    def run(self, environments: Sequence[Environment]) -> list[Result]:
        """Returns all results, by environment. An interruption ends what is running."""
        with sandbox.running() as sandbox_url, ThreadPoolExecutor(len(environments)) as pool:
            pending = [pool.submit(self._run_in, environment, sandbox_url) for environment in environments]
            try:
                return [result for one in pending for result in one.result()]
            finally:
                self._stopped.set()

    def _run_in(self, environment: Environment, sandbox_url: str) -> list[Result]:
        folder = self._work / environment.version
        lay_out(folder, self._server.model_name, self._server.tokenizer, self._seed, self._problems)
        renderer = _renderer(environment, self._server.model_name)
        named = self._server.model_name, renderer or RENDERER_NAME
        here = Situation(environment.version, self._server.base_url, *named, folder, sandbox_url)
        results = []
        for recipe in self._recipes:
            if recipe.in_catalogue and renderer is None:
                result = _inapplicable(recipe, environment, self._server.model_name)
            else:
                run = Run(recipe, here, environment, self._server.api_key, self._timeout_s, self._stopped)
                result = run.execute(partial(self._step, recipe, environment))
            self._report(result)
            results.append(result)
        return results

    def _step(self, recipe: Recipe, environment: Environment, steps: int) -> None:
        self._progress(environment.version, f"{recipe.name}, {steps} steps")


def _renderer(environment: Environment, model_name: str) -> str | None:
    """Returns the renderer that the cookbook's catalogue recommends for a model; None if it does not list the model."""
    code = "import sys; from tinker_cookbook.model_info import *; print(get_recommended_renderer_name(sys.argv[1]))"
    command = [str(environment.python), "-c", code, model_name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.split()[-1] if done.returncode == 0 else None


def _inapplicable(recipe: Recipe, environment: Environment, model_name: str) -> Result:
    why = (
        f"not applicable: it looks its renderer up by the model's name, and {model_name!r} is not in the cookbook's "
        f"catalogue; start the server with a name from there (fovea up --model-name {CATALOGUE_NAME})"
    )
    checks = list(recipe.checks)
    return Result(recipe.name, environment.version, environment.python_version, checks, 0, None, None, 0.0, False, why)
