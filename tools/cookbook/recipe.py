"""A recipe: a module of the cookbook with our options, or a program of ours that calls into one."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cookbook.criterion import Criterion

_PROGRAMS = "cookbook.programs"
_HOME = Path(__file__).parents[1]


@dataclass(frozen=True)
class Command:
    """A Python module to run.

    Attributes:
        module: Name of the module.
        arguments: Command-line arguments.
        path: Folder of the module, unless it is installed.
    """

    module: str
    arguments: list[str]
    path: Path | None = None


@dataclass(frozen=True)
class Situation:
    """The context in which a recipe runs.

    Attributes:
        version: Version of tinker-cookbook.
        base_url: URL of the server.
        model_name: Model name of the server.
        renderer_name: The cookbook's renderer for the model.
        folder: Folder with the datasets, in which recipes run.
        sandbox_url: URL of the local sandbox for programs that a model wrote; empty without one.
    """

    version: str
    base_url: str
    model_name: str
    renderer_name: str
    folder: Path
    sandbox_url: str = ""

    def log_folder(self, recipe: str) -> Path:
        """Returns the folder for a recipe's logs, metrics and records of checkpoints."""
        return self.folder / "logs" / recipe

    def checkpoint(self, recipe: str) -> str:
        """Returns the path of the last training checkpoint of an earlier recipe. Raises MissingCheckpoint."""
        file = self.log_folder(recipe) / "checkpoints.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        paths = [row["state_path"] for row in rows if "state_path" in row]
        if not paths:
            raise MissingCheckpoint(f"{recipe} saved no checkpoint to start from")
        return str(paths[-1])


class MissingCheckpoint(Exception):
    """The recipe that must run first has not run."""


SIZES = frozenset(
    "batch_size group_size groups_per_batch learning_rate max_steps max_tokens num_epochs save_every eval_every n_eval "
    "examples_per_class subset_seed".split()
)
"""Options that scale a recipe down to a tiny model and a few minutes."""
COMPUTATION = frozenset("loss_fn loss_fn_config temperature top_p top_k stop".split())
"""Settings of the loss and of sampling. No run may replace them: it would prove nothing about the recipe."""
LOCAL = frozenset("env dataset file_path behavior_if_log_dir_exists".split())
"""Options for local data and the folder of the logs."""


@dataclass(frozen=True)
class Replaced:
    """A replaced setting of a recipe that affects the computation, not only sizes or data.

    Attributes:
        value: Value in our run.
        own: The recipe's default by version of the cookbook; a missing version has no such option.
        why: Why the default does not work here.
    """

    value: str | int | bool
    own: dict[str, str | int | bool]
    why: str


@dataclass(frozen=True)
class Recipe:
    """One run.

    Attributes:
        name: Name of the run.
        checks: Checks of the contract that it covers.
        module: Module of tinker_cookbook to run; None if only our program runs.
        options: Options of the module, only sizes and local data.
        criteria: Criteria for its metrics; the first gives the figures of the table.
        after: Recipe that provides the checkpoint to start from.
        start_option: The module's option for that checkpoint. None if it resumes from its log folder.
        url_option: The module's option for the URL of the server, if any; TINKER_BASE_URL has it too.
        log_option: The module's option for the folder of its logs.
        renderer_option: The module's option for the renderer, if any.
        in_catalogue: Whether it looks up its renderer by the model's name, which must then be in the cookbook's
            catalogue.
        program: Module of `programs` that runs instead of the recipe, or after it to measure what it does not log.
        replaces: Replaced settings of the module. A run with one does not count as the recipe.
    """

    name: str
    checks: tuple[str, ...]
    module: str | None
    options: dict[str, Any]
    criteria: tuple[Criterion, ...]
    after: str | None = None
    start_option: str | None = None
    url_option: str | None = "base_url"
    log_option: str = "log_path"
    renderer_option: str | None = None
    in_catalogue: bool = False
    program: str | None = None
    replaces: dict[str, Replaced] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if hidden := self.options.keys() - SIZES - LOCAL:
            raise ValueError(f"{self.name} replaces {sorted(hidden)} but does not list them in `replaces`")
        if changed := self.replaces.keys() & COMPUTATION:
            raise ValueError(f"{self.name} replaces {sorted(changed)}: recipes run with their own loss and sampling")

    def replaced_in(self, version: str) -> dict[str, Replaced]:
        """Returns the settings that differ from the recipe's own in a version of the cookbook."""
        return {
            name: setting
            for name, setting in self.replaces.items()
            if version in setting.own and setting.own[version] != setting.value
        }

    def commands(self, here: Situation) -> list[Command]:
        """Returns the commands to run, in order. Raises MissingCheckpoint."""
        start = here.checkpoint(self.after) if self.after else None
        log = here.log_folder(self.name)
        commands = []
        if self.module:
            given: dict[str, Any] = {"model_name": here.model_name, self.log_option: log}
            if self.url_option:
                given[self.url_option] = here.base_url
            given |= self.options | {name: each.value for name, each in self.replaced_in(here.version).items()}
            if self.renderer_option:
                given[self.renderer_option] = here.renderer_name
            if self.start_option:
                given[self.start_option] = start
            commands.append(Command(self.module, [f"{name}={value}" for name, value in given.items()]))
        if self.program:
            told = {"base-url": here.base_url, "model-name": here.model_name, "renderer-name": here.renderer_name}
            told |= {"log-path": str(log)} | ({"state": start} if start else {})
            flags = [f"--{name}={value}" for name, value in told.items()]
            commands.append(Command(f"{_PROGRAMS}.{self.program}", flags, _HOME))
        return commands

    def prepare(self, here: Situation) -> None:
        """Places the start checkpoint where a recipe that can only resume finds it."""
        if self.after and self.module and not self.start_option:
            record = {"name": "start", "batch": 0, "state_path": here.checkpoint(self.after)}
            log = here.log_folder(self.name)
            log.mkdir(parents=True)
            (log / "checkpoints.jsonl").write_text(json.dumps(record) + "\n")

    def metrics(self, here: Situation) -> list[dict[str, Any]]:
        """Returns all rows for the criteria."""
        name = "measured.jsonl" if self.module and self.program else "metrics.jsonl"
        return [json.loads(line) for text in self._texts(here, name) for line in text.splitlines()]

    def steps_logged(self, here: Situation) -> int:
        """Returns how many rows the run has written so far."""
        return sum(text.count("\n") for text in self._texts(here, "metrics.jsonl"))

    def _texts(self, here: Situation, name: str) -> list[str]:
        # Some recipes create their own folder inside the given one.
        return [file.read_text() for file in sorted(here.log_folder(self.name).rglob(name))]
