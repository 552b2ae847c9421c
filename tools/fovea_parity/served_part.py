"""Compares sampler and trainer in a running Fovea: base weights, and an adapter and full weights after a push."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import tinker

from fovea.runtime.model_files import experts_of, language_entries, read_json
from fovea_demo.up import NotReady, running_fovea
from fovea_parity import adapter_kinds, refusals, router_border
from fovea_parity.adapter_kinds import MOST_NAT
from fovea_parity.documents import DocumentMaker, picture
from fovea_parity.finding import Finding, last_line, reason
from fovea_parity.learning_part import learn
from fovea_parity.prompts import API_KEY, Prompt, scores, trained_scores
from fovea_trainer.model.model_family import family_of

LEAST_CHANGE = 1e-3
"""The least change, in nat, that another image must cause in the log-probabilities of the text after it."""

_FOLLOWING = 3
"""The number of ids at the end of the text for which the change is measured."""

_DRAWS, _DRAWN = 8, 12
"""The number of sequences drawn with a seed, and the tokens of each."""

_STEPS = 3
_RANK = 8
_WAYS = {"base": (_RANK, 0, 0.0), "LoRA": (_RANK, _STEPS, 5e-3), "full": (0, _STEPS, 5e-4)}
"""For each comparison: the rank (0 trains all parameters), the number of training steps, and the learning rate."""

_TEXT = "Some words about nothing in particular."
_PROMPTS = ("text", "an image", "two images")


def check(directory: Path) -> Finding:
    """Starts a Fovea with the checkpoint and runs all comparisons."""
    os.environ["TINKER_TELEMETRY"] = "0"
    adapts_tower = bool(family_of(str(read_json(directory / "config.json")["model_type"])).tower_roles)
    os.environ["FOVEA_GATEWAY_TRAIN_VISION"] = str(adapts_tower).lower()
    maker = DocumentMaker(directory)
    is_chunked = language_entries(read_json(directory / "config.json")).get("attention_chunk_size")
    prompts = [Prompt(maker, [_TEXT * (6 if is_chunked else 1)])]
    if maker.family is not None:
        wide, high = picture((140, 90), 1), picture((60, 110), 2)
        prompts += [Prompt(maker, [wide, "What is this?"]), Prompt(maker, ["See ", high, " and ", wide, " now."])]
    try:
        with tempfile.TemporaryDirectory(prefix="fovea-models-") as folder:
            arguments = ("--port", "0", "--grpc-port", "0", "--ranks", "1")
            with running_fovea(Path(folder), directory, *arguments) as state:
                found = _compared(state, directory, prompts)
                return _and_kinds(found, state, prompts, adapts_tower) if "LoRA" in found.figures else found
    except NotReady as error:
        lines = [line for line in str(error).splitlines() if "Error" in line]
        return Finding("served", False, f"does not start: {last_line(chr(10).join(lines)) or reason(error)}")


def _compared(state: dict[str, Any], directory: Path, prompts: list[Prompt]) -> Finding:
    figures: dict[str, float] = {}
    maker, borders = prompts[0].maker, list[str]()
    problems: list[str] = []
    adapts = maker.family is None or maker.family.takes_adapters
    for way, (rank, steps, rate) in _WAYS.items():
        if way == "LoRA" and not adapts:
            continue
        try:
            with _client(state) as service:
                shape = rank if adapts else 0
                training, nats = _differences(service, str(state["model_name"]), prompts, shape, steps, rate)
                if experts_of(read_json(directory / "config.json")):
                    borders += _without_borders(state, training, directory, prompts, way, nats, figures)
        except Exception as error:  # any refusal or failure of a service is the finding
            problems.append(f"{way}: {reason(error)}")
            continue
        figures[way] = max(nats)
        if figures[way] > MOST_NAT:
            where = ", ".join(f"{nat:.1e} {name}" for nat, name in zip(nats, _PROMPTS, strict=False))
            problems.append(f"{way} is apart by nat of {where}")
    if "base" in figures:
        with _client(state) as service:
            problems += filter(None, [_seed_problem(service, str(state["model_name"]), prompts[-1])])
    if maker.family is not None and "base" in figures:
        with _client(state) as service:
            figures["image"] = _change(service, str(state["model_name"]), maker)
        if figures["image"] < LEAST_CHANGE:
            problems.append(f"another image changes what follows it by {figures['image']:.1e} nat")
        problems += _refusal_problems(state, prompts[1], adapts)
        problems += _note_lesson(state, maker, figures, is_full="LoRA" not in figures)
    agreed = [f"{way} {figures[way]:.1e}" for way in _WAYS if figures.get(way, 1.0) <= MOST_NAT]
    said = [f"sampler = trainer: {', '.join(agreed)} nat", *borders] if agreed else []
    if not adapts:
        said.append(_refused_adapter(state))
    return Finding("served", not problems, "; ".join([*problems, *said]), figures)


def _and_kinds(found: Finding, state: dict[str, Any], prompts: list[Prompt], adapts_tower: bool) -> Finding:
    """Returns the finding extended by the comparison of adapters of one kind of module each."""
    try:
        with _client(state) as service:
            kinds = adapter_kinds.compare(service, state, prompts, adapts_tower)
    except Exception as error:  # as above
        return replace(found, works=False, says=f"adapters of one kind: {reason(error)}; {found.says}")
    problems = [f"LoRA of {kind} alone {moved.problem}" for kind, moved in kinds.items() if moved.problem]
    apart, least = max(moved.apart for moved in kinds.values()), min(moved.moved for moved in kinds.values())
    said = f"{', '.join(kinds)} alone {apart:.1e}, each changes {least:.2f} or more"
    figures = {f"apart_{kind}": moved.apart for kind, moved in kinds.items()}
    figures |= {f"moved_{kind}": moved.moved for kind, moved in kinds.items()}
    says = "; ".join([*problems, found.says, *([] if problems else [said])])
    return replace(found, works=found.works and not problems, says=says, figures={**found.figures, **figures})


def _refusal_problems(state: dict[str, Any], prompt: Prompt, adapts: bool) -> list[str]:
    """Checks the responses to a prompt with a wrong token count or wrong tensors of its image; returns problems."""
    try:
        with _client(state) as service:
            wrong = refusals.wrong_count_problem(service, str(state["model_name"]), prompt)
        return [*filter(None, [wrong]), *refusals.wrong_tensor_problems(state, prompt, adapts)]
    except Exception as error:  # as above
        return [f"refusals: {reason(error)}"]


def _note_lesson(state: dict[str, Any], maker: DocumentMaker, figures: dict[str, float], is_full: bool) -> list[str]:
    """Teaches the model colours, adds the measurements to `figures`, and returns the problems."""
    try:
        with _client(state) as service:
            lesson = learn(service, str(state["model_name"]), maker, is_full=is_full)
    except Exception as error:  # as above
        return [f"learning: {reason(error)}"]
    figures |= {f"learning_{name}": value for name, value in asdict(lesson).items()}
    return [lesson.problem] if lesson.problem else []


def _refused_adapter(state: dict[str, Any]) -> str:
    """Checks that an adapter is refused with the reason, and returns that result. Raises RuntimeError if it is not."""
    with _client(state) as service:
        try:
            service.create_lora_training_client(base_model=str(state["model_name"]), rank=_RANK).result(300)
        except tinker.TinkerError as error:
            if "vLLM has no LoRA for this model; 0 trains all parameters" in str(error):
                return "adapters are refused, vLLM has none for it"
            raise
    raise RuntimeError("the gateway created an adapter for a model that does not support adapters")


@contextmanager
def _client(state: dict[str, Any]) -> Iterator[tinker.ServiceClient]:
    """Opens an SDK client; its models are deleted when the block ends.

    A model that trains all parameters cannot exist beside other models.
    """
    service = tinker.ServiceClient(base_url=str(state["base_url"]), api_key=API_KEY)
    try:
        yield service
    finally:
        service.close("success")


def _differences(
    service: tinker.ServiceClient, model: str, prompts: list[Prompt], rank: int, steps: int, rate: float
) -> tuple[tinker.TrainingClient, list[float]]:
    """Trains a model, and returns it with the largest difference of sampler and trainer for each prompt, in nat."""
    data = [prompt.datum() for prompt in prompts]
    training = service.create_lora_training_client(base_model=model, rank=rank, seed=1).result(300)
    for _ in range(steps):
        backward = training.forward_backward(data, "cross_entropy")
        step = training.optim_step(tinker.AdamParams(learning_rate=rate))
        backward.result(300)
        step.result(300)
    if steps:
        sampling = training.save_weights_and_get_sampling_client().result(300)
    else:
        sampling = service.create_sampling_client(base_model=model).result(300)
    both = zip(prompts, trained_scores(training, prompts), strict=True)
    return training, [float(np.abs(scores(sampling, prompt) - trained).max()) for prompt, trained in both]


def _without_borders(
    state: dict[str, Any],
    training: tinker.TrainingClient,
    directory: Path,
    prompts: list[Prompt],
    way: str,
    nats: list[float],
    figures: dict[str, float],
) -> list[str]:
    """Replaces a prompt's difference by that with the sampler's experts, if the router's choice is arbitrary there.

    Adds the original differences to `figures`, and returns a phrase about each.
    """
    said = []
    apart = [index for index, nat in enumerate(nats) if nat > MOST_NAT]
    found = router_border.compare(state, training, directory, [prompts[index] for index in apart]) if apart else []
    for index, same in zip(apart, found, strict=True):
        if same.is_border and same.apart <= MOST_NAT:
            figures[f"{way}_without_replay"] = max(nats[index], figures.get(f"{way}_without_replay", 0.0))
            figures[f"{way}_gap"] = same.gap
            said.append(f"{way} {nats[index]:.1e} without router replay, gap {abs(same.gap):.0e}")
            nats[index] = same.apart
    return said


def _change(service: tinker.ServiceClient, model: str, maker: DocumentMaker) -> float:
    """Returns the largest change of a log-probability after an image, in nat, if the image is replaced by another."""
    sampling = service.create_sampling_client(base_model=model).result(300)
    prompts = [Prompt(maker, [picture((140, 90), seed), "What is this?"]) for seed in (1, 2)]
    first, second = (scores(sampling, prompt)[-_FOLLOWING:] for prompt in prompts)
    return float(np.abs(first - second).max())


def _seed_problem(service: tinker.ServiceClient, model: str, prompt: Prompt) -> str:
    """Returns a problem if equal seeds draw different tokens, or different seeds the same tokens."""
    sampling = service.create_sampling_client(base_model=model).result(300)
    drawn = []
    for seed in (1, 1, 2):
        # At a high temperature, and with several sequences, because some end at their first token.
        how = tinker.SamplingParams(max_tokens=_DRAWN, seed=seed, temperature=2.0)
        drawn.append([list(one.tokens) for one in sampling.sample(prompt.input, _DRAWS, how).result(300).sequences])
    first, again, other = drawn
    if first != again:
        return "equal seeds draw different tokens"
    return "another seed draws the same tokens" if first == other else ""
