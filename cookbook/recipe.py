"""What a recipe is: a module of the cookbook with options of its own, or a program of ours that calls into one."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cookbook.criterion import Criterion

_PROGRAMS = "cookbook.programs"
_HOME = Path(__file__).parents[1]


@dataclass(frozen=True)
class Command:
    """A Python module to be run.

    Attributes:
        module: Its name.
        arguments: Of its command line.
        path: A folder to find it in, unless it is installed.
    """

    module: str
    arguments: list[str]
    path: Path | None = None


@dataclass(frozen=True)
class Situation:
    """Where a recipe runs.

    Attributes:
        version: Of tinker-cookbook.
        base_url: The server.
        model_name: As the server says it.
        renderer_name: The cookbook's renderer that fits the model.
        folder: The folder that holds the datasets; recipes run in it.
    """

    version: str
    base_url: str
    model_name: str
    renderer_name: str
    folder: Path

    def log_folder(self, recipe: str) -> Path:
        """Where a recipe keeps its logs, metrics and records of checkpoints."""
        return self.folder / "logs" / recipe

    def checkpoint(self, recipe: str) -> str:
        """The path of the last training checkpoint of a recipe that ran here. Raises MissingCheckpoint."""
        file = self.log_folder(recipe) / "checkpoints.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        paths = [row["state_path"] for row in rows if "state_path" in row]
        if not paths:
            raise MissingCheckpoint(f"{recipe} left no checkpoint to start from")
        return str(paths[-1])


class MissingCheckpoint(Exception):
    """The recipe that should have run before has not."""


SIZES = frozenset(
    "batch_size group_size groups_per_batch learning_rate max_steps max_tokens num_epochs save_every eval_every n_eval "
    "examples_per_class subset_seed".split()
)
"""Options that scale a recipe to a tiny model and few minutes."""
LOCAL = frozenset("env dataset file_path behavior_if_log_dir_exists".split())
"""Options that name data which lies here, or the folder of the logs."""


@dataclass(frozen=True)
class Replaced:
    """Another value in the place of a recipe's own setting, one that decides what is computed: no size, no data.

    Attributes:
        value: Of the run.
        own: The recipe's default, by version of the cookbook; a version that is left out has no such option.
        why: Why the default does not run.
    """

    value: str | int | bool
    own: dict[str, str | int | bool]
    why: str


@dataclass(frozen=True)
class Recipe:
    """One run.

    Attributes:
        name: Of this run.
        checks: The contract's checks that it stands for.
        module: The module of tinker_cookbook that runs, or None if only our program does.
        options: Of the module, as its command line takes them: sizes and local data alone.
        criteria: What its metrics must show; the first gives the figures of the table.
        after: The recipe whose last checkpoint it starts from.
        start_option: The module's option for that checkpoint. None: the loop finds it in its log folder and resumes.
        log_option: The module's option for the folder of its logs.
        renderer_option: The module's option for the renderer, if it has one.
        in_catalogue: Whether it looks its renderer up by the model's name, so that the name must be one of
            the cookbook's.
        program: A module of `programs` that runs instead of the recipe's, or after it to measure what it logs not.
        replaces: Other settings of the module that are not its own, by name. A run with one does not count as the
            recipe.
    """

    name: str
    checks: tuple[str, ...]
    module: str | None
    options: dict[str, Any]
    criteria: tuple[Criterion, ...]
    after: str | None = None
    start_option: str | None = None
    log_option: str = "log_path"
    renderer_option: str | None = None
    in_catalogue: bool = False
    program: str | None = None
    replaces: dict[str, Replaced] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if hidden := self.options.keys() - SIZES - LOCAL:
            raise ValueError(f"{self.name} replaces {sorted(hidden)} without saying so: list them in `replaces`")

    def replaced_in(self, version: str) -> dict[str, Replaced]:
        """The settings that differ from the recipe's own in a version of the cookbook."""
        return {
            name: setting
            for name, setting in self.replaces.items()
            if version in setting.own and setting.own[version] != setting.value
        }

    def commands(self, here: Situation) -> list[Command]:
        """What to run, one after the other. Raises MissingCheckpoint."""
        start = here.checkpoint(self.after) if self.after else None
        log = here.log_folder(self.name)
        commands = []
        if self.module:
            given = {"base_url": here.base_url, "model_name": here.model_name, self.log_option: log}
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
        """Lets a loop that can only resume find the checkpoint that it is to start from."""
        if self.after and self.module and not self.start_option:
            record = {"name": "start", "batch": 0, "state_path": here.checkpoint(self.after)}
            log = here.log_folder(self.name)
            log.mkdir(parents=True)
            (log / "checkpoints.jsonl").write_text(json.dumps(record) + "\n")

    def metrics(self, here: Situation) -> list[dict[str, Any]]:
        """All rows that the criteria judge."""
        name = "measured.jsonl" if self.module and self.program else "metrics.jsonl"
        return [json.loads(line) for text in self._texts(here, name) for line in text.splitlines()]

    def steps_logged(self, here: Situation) -> int:
        """How many rows the run has written so far."""
        return sum(text.count("\n") for text in self._texts(here, "metrics.jsonl"))

    def _texts(self, here: Situation, name: str) -> list[str]:
        # Some recipes make a folder of their own inside the one they are given.
        return [file.read_text() for file in sorted(here.log_folder(self.name).rglob(name))]
