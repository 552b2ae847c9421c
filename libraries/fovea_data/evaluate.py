"""Evaluates a served model on a dataset: `python -m fovea_data.evaluate MODEL DATA`, or `fovea evaluate`.

For chats and picture folders it measures the accuracy, the share of rows that the model answers to the letter. For
rollout records (rows with `env_class`) it measures the mean reward of one episode per row. Both have the standard error
of the mean over rows.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Literal

os.environ.setdefault("TINKER_TELEMETRY", "0")

import numpy as np
import typer

from fovea_data.answer_counts import AnswerCounts
from fovea_data.conversation import Asking, Conversation, check_positive, exact_match
from fovea_data.dataset import MAX_SIDE, QUESTION, Dataset, image_folder, load_chats
from fovea_data.rows import JsonLines, Parquet
from fovea_data.served_limits import ask_limits, checkpoint_metadata, picture_side
from fovea_rollout.environments.environment import Answer, Environment, Step
from fovea_rollout.environments.records import Source, load_records
from fovea_rollout.evaluation import evaluate
from fovea_rollout.messages import Message
from fovea_rollout.policies.policy import Policy, SamplingSettings
from fovea_rollout.rollout import RolloutSettings
from fovea_rollout.stopping import exiting_with_a_line
from fovea_rollout.templates.template import ChatTemplate

Kind = Literal["accuracy", "reward"]
_ASKING = Asking(QUESTION)


@dataclass(frozen=True)
class Report:
    """The results of an evaluation.

    Attributes:
        model: Name or path of the model.
        data: Path of the data.
        kind: The measured quantity: accuracy of rows, or reward of episodes.
        mean: Mean over the rows that did not fail; None if all failed.
        standard_error: Standard error of the mean, from the spread of the rows; None for fewer than two rows.
        rows: Number of rows that did not fail.
        failed: Number of rows that failed: broken or too long, or with an error of the server or the environment.
        first_failure: Error of the first failed row; empty if no row failed.
        metrics: The environments' metrics, averaged over rows.
        answers: Numbers of rows by label and answer, if the right answers are labels (see `AnswerCounts.of`).
        question: Question about each picture; empty unless the data is a folder of pictures.
        trained_question: Question that the checkpoint was fine-tuned with, if it is recorded.
        system_prompt: System prompt of each question.
    """

    model: str
    data: str
    kind: Kind
    mean: float | None
    standard_error: float | None
    rows: int
    failed: int
    first_failure: str
    metrics: dict[str, float]
    answers: AnswerCounts | None = None
    question: str = ""
    trained_question: str = ""
    system_prompt: str = ""

    def __str__(self) -> str:
        figure = f"{self.kind} of no row" if self.mean is None else f"{self.kind} {self.mean:.4f}"
        if self.standard_error is not None:
            figure += f" ± {self.standard_error:.4f}"
        lines = [f"{figure}, {self.rows} rows", *(f"  {name} {value:.4f}" for name, value in self.metrics.items())]
        if self.answers is not None:
            lines.append(str(self.answers))
        if self.question:
            differs = self.trained_question not in ("", self.question)
            lines.append(f'asked "{self.question}"' + f', but trained with "{self.trained_question}"' * differs)
            lines += [f'after the system prompt "{self.system_prompt}"'] * bool(self.system_prompt)
        if self.failed:
            lines.append(f"{self.failed} rows left out; the first: {self.first_failure}")
        return "\n".join(lines)


class RowSource:
    """A source of episodes about one row.

    Attributes:
        label: The row's right answer, once an episode has begun.
    """

    label = ""

    def __init__(self, dataset: Dataset, index: int) -> None:
        self._dataset, self._index = dataset, index

    def __call__(self) -> Environment:
        return RowEnvironment(self)

    def read(self) -> Conversation:
        """Reads the row. Raises InvalidInput, which names it, if it is broken."""
        row = self._dataset[self._index]
        self.label = row.answer
        return row


class RowEnvironment:
    """An environment that asks the question of a row. The reward is 1 for the answer of the row (see `exact_match`)."""

    def __init__(self, source: RowSource) -> None:
        self._source = source
        self._row: Conversation

    def reset(self) -> Sequence[Message]:
        """Returns the question. Raises InvalidInput, which names the row, if it is broken."""
        self._row = self._source.read()
        return self._row.question

    def step(self, answer: Answer) -> Step:
        """Scores the answer, which ends the episode."""
        return Step((), exact_match(answer.text, self._row), True)

    def close(self) -> None:
        """Does nothing: the environment has no resources."""


def read_sources(
    path: pathlib.Path, asking: Asking = _ASKING, limit: int | None = None, max_side: int | None = MAX_SIDE
) -> tuple[Kind, list[Source]]:
    """Returns the sources of a picture folder, or of a `.jsonl` or `.parquet` file with records or chats.

    Args:
        path: The folder or file.
        asking: Question about each picture of a folder, and the system prompt.
        limit: The most rows, evenly spread over the data; None for all.
        max_side: The most pixels of a picture's longer side, except in records. None does not limit the size.

    Raises:
        NotFound: The file or folder does not exist.
        InvalidInput: The file has another type, or a record is broken.
    """
    sources: list[Source]
    is_file = path.suffix in (".jsonl", ".parquet")
    if is_file and _has_records(path):
        kind: Kind = "reward"
        sources = list(load_records(path))
    else:
        kind = "accuracy"
        if is_file:
            dataset = load_chats(path, max_side=max_side)
        else:
            dataset = image_folder(path, asking.question, system_prompt=asking.system_prompt, max_side=max_side)
        sources = [RowSource(dataset, at) for at in range(len(dataset))]
    if limit is not None and limit < len(sources):
        check_positive(limit=limit)
        sources = [sources[index] for index in np.linspace(0, len(sources) - 1, limit).round().astype(int)]
    return kind, sources


async def measure(
    policy: Policy,
    template: ChatTemplate,
    kind: Kind,
    sources: Sequence[Source],
    settings: RolloutSettings,
    *,
    model: str = "",
    data: str = "",
    concurrency: int = 64,
    progress: bool | None = False,
) -> Report:
    """Plays one episode per source; returns the results. See `evaluate` for the arguments."""
    found = await evaluate(policy, template, sources, settings, concurrency=concurrency, progress=progress)
    # A rollout without a turn has no answer, because its question alone was too long.
    rewards = [one.reward for one in found.trajectories if one.is_scored]
    failed = [one for one in found.trajectories if not one.is_scored]
    why = failed[0].failure if failed else None
    first = why.error if why else "the question does not fit into the context" if failed else ""
    error = float(np.std(rewards, ddof=1)) / math.sqrt(len(rewards)) if len(rewards) > 1 else None
    mean = float(np.mean(rewards)) if rewards else None
    answers = AnswerCounts.of(
        (source.label, one.turns[-1].answer.text)
        for source, one in zip(sources, found.trajectories, strict=True)
        if isinstance(source, RowSource) and one.is_scored
    )
    return Report(model, data, kind, mean, error, len(rewards), len(failed), first, dict(found.metrics), answers)


def main(
    model: Annotated[str, typer.Argument(help="Name of a base model, or the tinker:// path of a sampler checkpoint.")],
    data: Annotated[
        pathlib.Path, typer.Argument(help="A folder of pictures by class, or a .jsonl or .parquet file.", exists=True)
    ],
    base_url: Annotated[
        str, typer.Option(envvar="TINKER_BASE_URL", help="Address of the server.")
    ] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str, typer.Option(envvar="TINKER_API_KEY", help="API key of the server; better set as variable.")
    ] = "tml-local",
    question: Annotated[
        str,
        typer.Option(
            help="Question about each picture of a folder. Default: the question that the checkpoint was fine-tuned"
            f" with, or '{QUESTION}'"
        ),
    ] = "",
    limit: Annotated[
        int | None, typer.Option(min=1, help="The most rows, evenly spread over the data; default: all.")
    ] = None,
    max_side: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="The most pixels of a picture's longer side; larger pictures are shrunk, 0 sets no limit. Default: the"
            f" limit that the checkpoint was fine-tuned with, or {MAX_SIDE}. It does not apply to records.",
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="The most tokens of an answer.")] = 256,
    max_turns: Annotated[int, typer.Option(min=1, help="The most turns of an episode.")] = 8,
    max_context: Annotated[int, typer.Option(min=1, help="The most tokens of a whole episode.")] = 4096,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of sampling.")] = 0,
    concurrency: Annotated[int, typer.Option(min=1, help="The most episodes that run at once.")] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print the results of a model on a dataset. The exit code is 1 if a row failed, and 2 if all rows failed."""
    settings = RolloutSettings(
        SamplingSettings(max_tokens, temperature, seed=seed), max_turns=max_turns, max_context=max_context
    )
    with exiting_with_a_line():
        ask_limits(base_url, api_key)  # raises at once if no server answers or the key is wrong
        import tinker  # late, because it takes seconds

        from fovea_rollout.policies.tinker_policy import TinkerPolicy

        with tinker.ServiceClient(base_url=base_url, api_key=api_key) as service:
            is_checkpoint = model.startswith("tinker://")
            metadata: Mapping[str, str] = {}
            if is_checkpoint:
                metadata = checkpoint_metadata(tinker.RestClient(base_url=base_url, api_key=api_key), model)
            side = picture_side(metadata, MAX_SIDE) if max_side is None else max_side or None
            trained = Asking.recorded(metadata)
            asking = trained or _ASKING
            if question and question != asking.question:
                asking = Asking(question)  # a system prompt of training belongs to its question
            kind, sources = read_sources(data, asking, limit, side)
            if is_checkpoint:
                sampling = service.create_sampling_client(model_path=model).result()
            else:
                sampling = service.create_sampling_client(base_model=model).result()
            asked = f', asked "{asking.question}"' if data.is_dir() else ""
            print(f"evaluating {model} on {len(sources)} rows of {data}{asked}", file=sys.stderr, flush=True)
            played = measure(
                TinkerPolicy(sampling),
                ChatTemplate(sampling.get_tokenizer()),
                kind,
                sources,
                settings,
                model=model,
                data=str(data),
                concurrency=concurrency,
                progress=None,
            )
            report = asyncio.run(played)
    if data.is_dir():
        learnt = trained.question if trained else ""
        report = replace(report, question=asking.question, trained_question=learnt, system_prompt=asking.system_prompt)
    print(json.dumps(asdict(report)) if as_json else report)
    raise typer.Exit(0 if not report.failed else 1 if report.rows else 2)


def _has_records(path: pathlib.Path) -> bool:
    """Returns whether the first row names an environment. Raises InvalidInput if the row cannot be read."""
    rows = JsonLines(path) if path.suffix == ".jsonl" else Parquet(path)
    row = rows.row(0) if len(rows) else None
    return isinstance(row, dict) and row.get("env_class") is not None


if __name__ == "__main__":
    app = typer.Typer(add_completion=False)
    app.command()(main)
    app(prog_name="fovea evaluate")
